package archtest

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/token"
	"go/types"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/tools/go/packages"
)

// Structure bounds the size of types and the ways in which a type hides its parts. Generated files and
// test files are not bound.
type Structure struct {
	// Methods is the maximum number of methods of a type, with the promoted ones. Interface is the maximum
	// number of methods of an interface.
	Methods, Interface int
	// Exceptions maps a known violation, written as in a Finding's Where and kind
	// ("nsqd/queue.Topic: methods"), to its figure. A violation may shrink and may not grow. A violation
	// that has no figure has 1.
	Exceptions map[string]int
	Why        string
}

// The kinds of violations.
const (
	tooManyMethods  = "methods"   // a type above Structure.Methods
	wideInterface   = "interface" // an interface above Structure.Interface
	mutexName       = "mu"        // a field called mu that is not a mutex
	embeddedPointer = "embeds"    // a struct that embeds a pointer to a type of its own package
)

// CheckStructure returns the types that break the rule, and the exceptions that name no violation.
func (m *Module) CheckStructure(rule Structure) ([]Finding, error) {
	loaded, err := m.typed()
	if err != nil {
		return nil, err
	}
	c := structureCheck{rule: rule, excepted: map[string]bool{}}
	for _, pkg := range loaded {
		c.path, c.pkg = m.relative(pkg.PkgPath), pkg
		for _, file := range pkg.Syntax {
			if !ast.IsGenerated(file) {
				c.declarations(file)
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(rule.Exceptions)) {
		if !c.excepted[name] {
			c.found = append(c.found, Finding{name, "is an exception and breaks no rule: delete the exception", rule.Why})
		}
	}
	return c.found, nil
}

type structureCheck struct {
	rule     Structure
	path     string // of pkg, relative to the module
	pkg      *packages.Package
	excepted map[string]bool // exceptions that were needed
	found    []Finding
}

// declarations checks the types that a file declares at package level.
func (c *structureCheck) declarations(file *ast.File) {
	for _, decl := range file.Decls {
		general, ok := decl.(*ast.GenDecl)
		if !ok || general.Tok != token.TYPE {
			continue
		}
		for _, spec := range general.Specs {
			name := spec.(*ast.TypeSpec).Name
			if object := c.pkg.TypesInfo.Defs[name].(*types.TypeName); !object.IsAlias() {
				c.declared(name.Name, object.Type())
			}
		}
	}
	ast.Inspect(file, func(n ast.Node) bool {
		if spec, ok := n.(*ast.TypeSpec); ok {
			if fields, ok := spec.Type.(*ast.StructType); ok {
				c.fields(spec.Name.Name, fields)
			}
		}
		return true
	})
}

func (c *structureCheck) declared(name string, t types.Type) {
	if i, ok := t.Underlying().(*types.Interface); ok {
		if n := i.NumMethods(); n > c.rule.Interface {
			c.report(name, wideInterface, n, "an interface of %d methods (at most %d)", n, c.rule.Interface)
		}
		return
	}
	if n := types.NewMethodSet(types.NewPointer(t)).Len(); n > c.rule.Methods {
		c.report(name, tooManyMethods, n, "%d methods, with the promoted ones (at most %d)", n, c.rule.Methods)
	}
}

func (c *structureCheck) fields(name string, fields *ast.StructType) {
	for _, f := range fields.Fields.List {
		t := types.Unalias(c.pkg.TypesInfo.TypeOf(f.Type))
		pointer, isPointer := t.(*types.Pointer)
		if isPointer {
			t = pointer.Elem()
		}
		named, _ := types.Unalias(t).(*types.Named)
		for _, id := range f.Names {
			if id.Name == "mu" && !mutex(t) {
				c.report(name, mutexName, 1, "the field mu is no mutex but a %s", types.TypeString(t, types.RelativeTo(c.pkg.Types)))
			}
		}
		if len(f.Names) == 0 && isPointer && named != nil && named.Obj().Pkg() == c.pkg.Types {
			c.report(name, embeddedPointer, 1, "embeds a pointer to %s, a part of the same package", named.Obj().Name())
		}
	}
}

// mutex reports whether t is a mutex, or an unnamed struct of guarded fields that embeds its mutex.
func mutex(t types.Type) bool {
	switch t := types.Unalias(t).(type) {
	case *types.Named:
		name := t.Obj()
		return name.Pkg() != nil && name.Pkg().Path() == "sync" && (name.Name() == "Mutex" || name.Name() == "RWMutex")
	case *types.Struct:
		for i := range t.NumFields() {
			if f := t.Field(i); f.Embedded() && mutex(f.Type()) {
				return true
			}
		}
	}
	return false
}

// report adds a finding unless an exception covers it.
func (c *structureCheck) report(name, kind string, figure int, format string, args ...any) {
	place := c.path + "." + name
	exception := place + ": " + kind
	if allowed, ok := c.rule.Exceptions[exception]; ok {
		c.excepted[exception] = true
		if figure <= allowed {
			return
		}
		format += fmt.Sprintf("; as an exception at most %d", allowed)
	}
	c.found = append(c.found, Finding{place, fmt.Sprintf(format, args...), c.rule.Why})
}

// CountLines returns the number of lines of the packages that match the patterns, without test files and
// generated files.
func (m *Module) CountLines(patterns ...string) (int, error) {
	count := 0
	for _, p := range m.Packages {
		if !matchAny(patterns, p.Path) {
			continue
		}
		for _, name := range slices.Concat(p.Files, p.Ignored) {
			text, err := os.ReadFile(filepath.Join(p.Dir, name))
			if err != nil {
				return 0, err
			}
			if !strings.HasSuffix(name, "_test.go") && !strings.HasSuffix(name, ".pb.go") {
				count += bytes.Count(text, []byte("\n"))
			}
		}
	}
	return count, nil
}
