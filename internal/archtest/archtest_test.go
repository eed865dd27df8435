package archtest

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// The fixture in testdata/module breaks each rule. A comment `// want "part of it"` on a line expects
// a finding in the middle of a file; findings on whole packages are listed in the tests.

func fixture(t *testing.T) *Module {
	t.Helper()
	t.Setenv("GOWORK", "off")
	m := testkit.Result(Load(filepath.Join("testdata", "module"))).Must(t)
	return m
}

var want = regexp.MustCompile(`// want "([^"]*)"`)

// wanted collects the want comments below dir as "file:line: text".
func wanted(t *testing.T, dir string) []string {
	t.Helper()
	var all []string
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".go" {
			return err
		}
		text, err := os.ReadFile(path)
		for i, line := range strings.Split(string(text), "\n") {
			for _, m := range want.FindAllStringSubmatch(line, -1) {
				rel, err := filepath.Rel(filepath.Join("testdata", "module"), path)
				if err != nil {
					return err
				}
				all = append(all, fmt.Sprintf("%s:%d: %s", filepath.ToSlash(rel), i+1, m[1]))
			}
		}
		return err
	})
	testkit.Must(t, err)
	return all
}

// compare matches findings with the wanted texts, one to one. A finding matches if it begins with the
// wanted text.
func compare(t *testing.T, found []Finding, wanted []string) {
	t.Helper()
	for _, f := range found {
		if f.Why == "" {
			t.Errorf("no reason: %s", f)
		}
		shown := f.Where + ": " + f.What
		i := slices.IndexFunc(wanted, func(w string) bool { return strings.HasPrefix(shown, w) })
		if i < 0 {
			t.Errorf("not wanted: %s", shown)
			continue
		}
		wanted = slices.Delete(wanted, i, i+1)
	}
	for _, w := range wanted {
		t.Errorf("not found: %s", w)
	}
}

func purity(packages ...string) Purity {
	rule := pure // as for the module itself
	rule.Packages = packages
	rule.Std = map[string]string{}
	for _, path := range []string{"errors", "fmt", "maps", "math/rand/v2", "slices", "sort", "strings", "time"} {
		rule.Std[path] = "known to the fixture"
	}
	return rule
}

func TestPurity(t *testing.T) {
	m := fixture(t)
	for _, name := range []string{"clock", "concurrent", "order", "state", "random", "printing", "good"} {
		t.Run(name, func(t *testing.T) {
			found := testkit.Result(m.CheckPurity(purity("pure/" + name))).Must(t)
			compare(t, found, wanted(t, filepath.Join("testdata", "module", "pure", name)))
		})
	}
}

func TestPurityOfImports(t *testing.T) {
	found := testkit.Result(fixture(t).CheckPurity(purity("pure/imports", "pure/good"))).Must(t)
	compare(t, found, []string{
		"pure/imports: is pure and imports impure, which is not",
		"pure/imports: is pure and imports os",
		"pure/imports: is pure and imports sync",
	})
}

func TestPurityOfOtherPlatforms(t *testing.T) {
	found := testkit.Result(fixture(t).CheckPurity(purity("pure/platform"))).Must(t)
	compare(t, found, []string{"pure/platform/platform_windows.go: a file of a pure package that this build leaves out"})
}

func TestPurityOfAPackageThatIsGone(t *testing.T) {
	found := testkit.Result(fixture(t).CheckPurity(purity("pure/good", "pure/gone"))).Must(t)
	compare(t, found, []string{"pure/gone: a rule names this package, which does not exist"})
}

func TestArrows(t *testing.T) {
	m := fixture(t)
	for _, c := range []struct {
		name  string
		arrow Arrow
		want  []string
	}{
		{"only, kept", Arrow{From: []string{"upper/..."}, Only: []string{"lower/x"}}, nil},
		{"only, broken", Arrow{From: []string{"upper/...", "lower/x"}, Only: []string{"lower/x"}}, []string{"lower/x: imports lower/y"}},
		{"only, nothing allowed", Arrow{From: []string{"upper/..."}, Only: []string{}}, []string{"upper/a: imports lower/x"}},
		{"only, in tests", Arrow{From: []string{"upper/a"}, Only: []string{"lower/x"}, Tests: true}, []string{"upper/a: imports, in a test, lower/y"}},
		{"never, broken", Arrow{From: []string{"..."}, Never: []string{"lower/..."}}, []string{"upper/a: imports lower/x", "lower/x: imports lower/y"}},
		{"never, with an exception", Arrow{From: []string{"..."}, Except: []string{"lower/..."}, Never: []string{"lower/..."}}, []string{"upper/a: imports lower/x"}},
		{"never, of the standard library", Arrow{From: []string{"..."}, Never: []string{"std:net/http/pprof"}}, []string{"lower/x: imports net/http/pprof"}},
		{"never, of another module", Arrow{From: []string{"..."}, Never: []string{"golang.org/x/time/..."}}, nil},
		{"a package that is gone", Arrow{From: []string{"upper/b"}, Except: []string{"up/..."}, Only: []string{"lower/z"}, Never: []string{"low"}}, []string{
			"upper/b: a rule names this package", "up/...: a rule names this package", "lower/z: a rule names this package", "low: a rule names this package"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.arrow.Why = "a reason"
			compare(t, m.CheckArrows([]Arrow{c.arrow}), c.want)
		})
	}
}

func TestComments(t *testing.T) {
	found := testkit.Result(fixture(t).CheckComments("a reason")).Must(t)
	compare(t, found, []string{
		"comments/none: no package comment",
		"comments/two: a package comment in each of a.go, b.go",
		`comments/wrong: the package comment in wrong.go does not begin with "Package wrong"`,
		`comments/prog: the package comment in main.go does not begin with "Command prog"`,
	})
}

func TestShuns(t *testing.T) {
	found, err := fixture(t).CheckShuns([]Shun{
		{Path: "net/http", Name: "DefaultServeMux", From: []string{"..."}, Why: "a reason"},
		{Path: "math/rand/v2", Name: "IntN", From: []string{"..."}, Except: []string{"pure/random"}, Why: "a reason"},
		{Path: "time", Name: "Sleep", From: []string{"habits"}, TestsOnly: true, Why: "a reason"},
		{Path: "time", Name: "Sleep", From: []string{"gone/..."}, Why: "a reason"},
	})
	testkit.Must(t, err)
	compare(t, found, append(wanted(t, filepath.Join("testdata", "module", "habits")),
		"gone/...: a rule names this package, which does not exist"))
}

const wideTypes = `package structure

import "sync"

type part struct{ sync.Mutex }

func (*part) A() {}
func (*part) B() {}

type whole struct { // 5 methods: Lock, TryLock, Unlock, A, B
	*part
	mu part
}

type small struct {
	mu    *sync.RWMutex
	other sync.Mutex
	whole *whole
}

func (small) A() {}

type wide interface {
	A()
	B()
	C()
}

type narrow interface{ A() }
`

func TestStructure(t *testing.T) {
	dir := t.TempDir()
	testkit.Must(t, os.WriteFile(filepath.Join(dir, "go.mod"), []byte("module fixture.test/m\n\ngo 1.26.0\n"), 0o600))
	testkit.Must(t, os.WriteFile(filepath.Join(dir, "structure.go"), []byte(wideTypes), 0o600))
	t.Setenv("GOWORK", "off")
	m := testkit.Result(Load(dir)).Must(t)
	check := func(exceptions map[string]int) []Finding {
		rule := Structure{Methods: 4, Interface: 2, Exceptions: exceptions, Why: "a reason"}
		return testkit.Result(m.CheckStructure(rule)).Must(t)
	}
	compare(t, check(nil), []string{
		"..part: 5 methods, with the promoted ones (at most 4)",
		"..whole: 5 methods, with the promoted ones (at most 4)",
		"..whole: embeds a pointer to part, a part of the same package",
		"..whole: the field mu is no mutex but a part",
		"..wide: an interface of 3 methods (at most 2)",
	})
	compare(t, check(map[string]int{
		"..part: methods":   5,
		"..whole: methods":  4,
		"..whole: embeds":   1,
		"..whole: mu":       1,
		"..wide: interface": 4,
		"..small: mu":       1,
	}), []string{
		"..whole: 5 methods, with the promoted ones (at most 4); as an exception at most 4",
		"..small: mu: is an exception and breaks no rule",
	})
}

func TestCountLines(t *testing.T) {
	m := fixture(t)
	testkit.Equal(t, testkit.Result(m.CountLines("upper/...", "comments/tool")).Must(t), 8, "lines of two packages")
}

func TestLoadReportsAFolderWithoutAModule(t *testing.T) {
	if m, err := Load(t.TempDir()); err == nil {
		t.Errorf("loaded %+v", m)
	}
}

func TestMatch(t *testing.T) {
	for _, c := range []struct {
		pattern, path string
		want          bool
	}{
		{"a/b", "a/b", true},
		{"a/b", "a/b/c", false},
		{"a/...", "a", true},
		{"a/...", "a/b/c", true},
		{"a/...", "ab", false},
		{"...", "anything", true},
	} {
		testkit.Equal(t, match(c.pattern, c.path), c.want, "match(%q, %q)", c.pattern, c.path)
	}
}

func TestProse(t *testing.T) {
	var good, bad, old Prose
	good.Add("The ledger frees the share. A restarted process must wait for the next grant.")
	bad.Add("What it held, which it returns, is free: of which it never was there is nothing.")
	testkit.Equal(t, good, Prose{Words: 14}, "a sentence with nouns")
	testkit.Equal(t, bad, Prose{Words: 16, Pronouns: 6, Hanging: 1}, "a sentence that hangs")
	old.Add("A broker tells the adaptor, but a foretells b. Somebody reads.")
	testkit.Equal(t, old, Prose{Words: 11, Retired: " tells Somebody"}, "sentences with retired words")

	limit := ProseLimit{Pronouns: 10, Hanging: 100}
	texts := map[string]Prose{
		"small": {Words: fewWords - 1, Pronouns: 100},
		"good":  {Words: 1000, Pronouns: 100, Hanging: 10},
		"long":  {Words: 1000, Pronouns: 101},
		"hangs": {Words: 1000, Hanging: 11},
		"old":   {Words: 1, Retired: " tells"},
	}
	var where []string
	for _, f := range judge(texts, limit, limit, "all", "why") {
		where = append(where, f.Where)
	}
	testkit.EqualSlices(t, where, []string{"hangs", "long", "old"}, "texts above the limit or with a retired word; all together are within it")

	root := t.TempDir()
	page := "# What it is of which\n\nThe page says that\nof which\n\n    what it is\n| it | which |\n```\nwhat it is\n```\n"
	testkit.Must(t, os.WriteFile(filepath.Join(root, "page.md"), []byte(page), 0o600))
	found := testkit.Result(CheckPages(root, []string{"page.md"}, limit, ProseLimit{}, "why")).Must(t)
	testkit.Equal(t, len(found), 1, "findings")
	testkit.Equal(t, found[0].What, "6 words, 33.3 % pronouns (at most 0), 1666.7 hanging references per 10,000 words (at most 0)", "the words that count")

	m := fixture(t)
	found = testkit.Result(m.CheckProse(false, limit, ProseLimit{}, "why")).Must(t)
	testkit.Equal(t, found[len(found)-1].Where, "all packages", "the whole is judged")
}

func TestCheckLinks(t *testing.T) {
	root := t.TempDir()
	testkit.Must(t, os.WriteFile(filepath.Join(root, "a.md"), []byte(`# A page's "title", and more
[here](#a-pages-title-and-more) [there](b.md#spot) [elsewhere](https://example.org/#none) [folder](.)
[no file](c.md) [no anchor](b.md#none) [nor here](#none)
`+"```sh\n[code](d.md)\n```\n"), 0o600))
	testkit.Must(t, os.WriteFile(filepath.Join(root, "b.md"), []byte("<a id=\"spot\"></a>\n```\n# none\n```\n"), 0o600))
	found := testkit.Result(CheckLinks(root, []string{"a.md", "b.md"}, "why")).Must(t)
	testkit.EqualSlices(t, found, []Finding{
		{"a.md", "links to c.md, which does not exist", "why"},
		{"a.md", "links to b.md#none, an anchor that does not exist", "why"},
		{"a.md", "links to #none, an anchor that does not exist", "why"},
	}, "findings")
}
