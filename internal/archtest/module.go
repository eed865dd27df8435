// Package archtest has the rules of the code base that the compiler does not check: allowed imports
// (arrows), restrictions on pure packages (purity), bounds on the size of types (structure), and a few habits. The test applies the rules in
// rules_test.go to this module. For each broken rule the test fails with the rule's reason. The test
// also fails if a rule names a package that does not exist. The package knows only the names of other
// packages. docs/ARCHITECTURE.md has the picture behind the rules.
package archtest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/tools/go/packages"
)

// Module is a Go module as `go list` sees the module, with the modules of the workspace in its folders.
type Module struct {
	Path     string // "github.com/srtm-io/srtm"
	Dir      string
	Packages []*Package // sorted by path

	checked []*packages.Package // by typed; nil: not loaded yet
}

// Package is one package of a module.
type Package struct {
	// Path is relative to the module: "nsq/wire"; "." is the root.
	Path string
	Name string
	Dir  string

	// Files has the names of the non-test files that this platform builds. Ignored has the files that
	// build constraints exclude. Tests has the test files.
	Files, Ignored, Tests []string

	// Imports and TestImports are full import paths. TestImports has only the imports of test files.
	Imports, TestImports []string
}

// Main reports whether the package is a program.
func (p *Package) Main() bool { return p.Name == "main" }

// Load lists the module whose go.mod is in dir, and the modules in the folders nested.
func Load(dir string, nested ...string) (*Module, error) {
	if err := touch(dir); err != nil {
		return nil, err
	}
	cmd := exec.Command("go", "list", "-e", "-json=ImportPath,Name,Dir,Module,GoFiles,CgoFiles,IgnoredGoFiles,TestGoFiles,XTestGoFiles,Imports,TestImports,XTestImports", "./...")
	for _, folder := range nested {
		cmd.Args = append(cmd.Args, "./"+folder+"/...")
	}
	cmd.Dir = dir
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w\n%s", err, &stderr)
	}
	m := new(Module)
	for decoder := json.NewDecoder(bytes.NewReader(out)); ; {
		var listed struct {
			ImportPath, Name, Dir              string
			Module                             *struct{ Path, Dir string }
			GoFiles, CgoFiles, IgnoredGoFiles  []string
			TestGoFiles, XTestGoFiles          []string
			Imports, TestImports, XTestImports []string
		}
		if err := decoder.Decode(&listed); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, fmt.Errorf("go list: %w", err)
		}
		if listed.Module == nil {
			return nil, fmt.Errorf("go list: %s belongs to no module", listed.ImportPath)
		}
		if m.Path == "" { // nested modules come later
			m.Path, m.Dir = listed.Module.Path, listed.Module.Dir
		}
		m.Packages = append(m.Packages, &Package{
			Path:        m.relative(listed.ImportPath),
			Name:        listed.Name,
			Dir:         listed.Dir,
			Files:       slices.Concat(listed.GoFiles, listed.CgoFiles),
			Ignored:     listed.IgnoredGoFiles,
			Tests:       slices.Concat(listed.TestGoFiles, listed.XTestGoFiles),
			Imports:     listed.Imports,
			TestImports: slices.Concat(listed.TestImports, listed.XTestImports),
		})
	}
	if len(m.Packages) == 0 {
		return nil, fmt.Errorf("no packages below %s", dir)
	}
	slices.SortFunc(m.Packages, func(a, b *Package) int { return strings.Compare(a.Path, b.Path) })
	return m, nil
}

// typed returns the packages that have files other than tests, with syntax and types. The first call
// loads them.
func (m *Module) typed() ([]*packages.Package, error) {
	if m.checked != nil {
		return m.checked, nil
	}
	var patterns []string
	for _, p := range m.Packages {
		if len(p.Files) > 0 {
			patterns = append(patterns, m.Path+"/"+p.Path)
		}
	}
	loaded, err := packages.Load(&packages.Config{
		Mode: packages.NeedName | packages.NeedFiles | packages.NeedImports | packages.NeedSyntax | packages.NeedTypes | packages.NeedTypesInfo,
		Dir:  m.Dir,
	}, patterns...)
	if err != nil {
		return nil, fmt.Errorf("load %s: %w", strings.Join(patterns, " "), err)
	}
	for _, pkg := range loaded {
		for _, err := range pkg.Errors {
			return nil, fmt.Errorf("load %s: %w", pkg.PkgPath, err)
		}
	}
	m.checked = loaded
	return loaded, nil
}

// touch reads every folder and every Go file below dir. The go command then knows these files as inputs
// of the test and does not reuse a cached result. The go command sees the files that the test itself
// opens, but not the files that `go list` opens.
func touch(dir string) error {
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != dir && (strings.HasPrefix(d.Name(), ".") || d.Name() == "bin" || d.Name() == "build"):
			return filepath.SkipDir
		case filepath.Ext(path) == ".go" && d.Type().IsRegular():
			_, err := os.ReadFile(path)
			if errors.Is(err, fs.ErrNotExist) {
				return nil // deleted since the folder was read, for example by an editor
			}
			return err
		}
		return nil
	})
}

// relative makes an import path of this module relative. Other paths stay unchanged.
func (m *Module) relative(path string) string {
	if path == m.Path {
		return "."
	}
	return strings.TrimPrefix(path, m.Path+"/")
}

// ours reports whether path belongs to the module, and returns the relative path.
func (m *Module) ours(path string) (string, bool) {
	return m.relative(path), path == m.Path || strings.HasPrefix(path, m.Path+"/")
}

// match reports whether path matches pattern: a path, a path and all paths below ("nsqd/..."), or
// everything ("...").
func match(pattern, path string) bool {
	if pattern == "..." {
		return true
	}
	if base, ok := strings.CutSuffix(pattern, "/..."); ok {
		return path == base || strings.HasPrefix(path, base+"/")
	}
	return path == pattern
}

func matchAny(patterns []string, path string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool { return match(p, path) })
}

// missing returns a finding for each pattern without a matching package.
func (m *Module) missing(patterns []string, why string) []Finding {
	var found []Finding
	for _, pattern := range patterns {
		if !slices.ContainsFunc(m.Packages, func(p *Package) bool { return match(pattern, p.Path) }) {
			found = append(found, Finding{Where: pattern, What: "a rule names this package, which does not exist", Why: why})
		}
	}
	return found
}

// Finding is a place where a rule is broken.
type Finding struct {
	Where string // a package, or file:line
	What  string
	Why   string // the rule's reason
}

func (f Finding) String() string {
	return fmt.Sprintf("%s: %s\n\t%s", f.Where, f.What, f.Why)
}
