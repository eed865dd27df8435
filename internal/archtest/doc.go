// Package archtest holds the rules of the code base that a compiler does not
// know: who may import whom (arrows), what a pure package may do (purity), and
// a few habits. Its test applies the rules in rules_test.go to this module and
// fails with the reason of the rule that is broken; it fails also when a rule
// names a package that is gone. It knows the names of packages, and nothing of
// what they are for. docs/ARCHITECTURE.md has the picture behind the rules.
package archtest
