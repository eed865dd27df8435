// Package archtest has the rules of the code base that the compiler does not check: allowed imports
// (arrows), restrictions on pure packages (purity), bounds on the size of types (structure), and a few habits. The test applies the rules in
// rules_test.go to this module. For each broken rule the test fails with the rule's reason. The test
// also fails if a rule names a package that does not exist. The package knows only the names of other
// packages. docs/ARCHITECTURE.md has the picture behind the rules.
package archtest
