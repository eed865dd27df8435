package names_test

import (
	"bytes"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/mqtt/names"
)

// wantFault compares an error with a part of its text; "" means no error.
func wantFault(t *testing.T, err error, want, what string) {
	t.Helper()
	if want == "" {
		testkit.NoError(t, err, what)
	} else {
		testkit.ErrorHas(t, err, want, what)
	}
}

func TestCheckFilter(t *testing.T) {
	for filter, want := range map[string]string{
		"a": "", "a/b": "", "/": "", "a//b": "", "+": "", "#": "", "+/+": "", "a/+/b": "", "a/#": "", "$SYS/#": "", "é/ü": "",
		"":                            "is empty",
		"a#":                          "wildcard",
		"#/a":                         "wildcard",
		"a/#/b":                       "wildcard",
		"a+/b":                        "wildcard",
		"++":                          "wildcard",
		"a\x00":                       "zero byte",
		"\xff":                        "UTF-8",
		strings.Repeat("a", 247):      "longer than 246 bytes",
		strings.Repeat("a", 246):      "",
		strings.Repeat("/", 31):       "",
		strings.Repeat("/", 32):       "more than 32 levels",
		strings.Repeat("/", 31) + "#": "",
	} {
		wantFault(t, names.CheckFilter(filter), want, filter)
	}
}

func TestCheckName(t *testing.T) {
	for name, want := range map[string]string{
		"a": "", "/": "", "a/ b": "", "$SYS/x": "", "日本": "",
		"":                       "is empty",
		"a/+":                    "contains a wildcard",
		"#":                      "contains a wildcard",
		"a\x00b":                 "zero byte",
		"\xc3":                   "UTF-8",
		strings.Repeat("a", 247): "exceeds a limit",
		strings.Repeat("/", 32):  "exceeds a limit",
	} {
		wantFault(t, names.CheckName([]byte(name)), want, name)
	}
}

// The examples of the specification, 4.7.1 and 4.7.2.
func TestMatchOfTheSpecification(t *testing.T) {
	for _, c := range []struct {
		filter, name string
		want         bool
	}{
		{"sport/tennis/player1/#", "sport/tennis/player1", true},
		{"sport/tennis/player1/#", "sport/tennis/player1/ranking", true},
		{"sport/tennis/player1/#", "sport/tennis/player1/score/wimbledon", true},
		{"sport/#", "sport", true},
		{"sport/tennis/+", "sport/tennis/player1", true},
		{"sport/tennis/+", "sport/tennis/player1/ranking", false},
		{"sport/+", "sport", false},
		{"sport/+", "sport/", true},
		{"+/+", "/finance", true},
		{"/+", "/finance", true},
		{"+", "/finance", false},
		{"#", "$SYS/monitor", false},
		{"+/monitor/Clients", "$SYS/monitor/Clients", false},
		{"$SYS/#", "$SYS/monitor", true},
		{"$SYS/monitor/+", "$SYS/monitor/Clients", true},
		{"ACCOUNTS", "Accounts", false},
		{"a", "ab", false},
		{"ab", "a", false},
	} {
		if got := names.Match(c.filter, []byte(c.name)); got != c.want {
			t.Errorf("Match(%q, %q) = %v", c.filter, c.name, got)
		}
	}
}

// naiveMatch is the specification by recursion over levels.
func naiveMatch(filter, name string) bool {
	f, n := strings.Split(filter, "/"), strings.Split(name, "/")
	if strings.HasPrefix(name, "$") && (f[0] == "+" || f[0] == "#") {
		return false
	}
	var match func(f, n []string) bool
	match = func(f, n []string) bool {
		switch {
		case len(f) == 1 && f[0] == "#":
			return true
		case len(f) == 0 || len(n) == 0:
			return len(f) == len(n)
		}
		return (f[0] == "+" || f[0] == n[0]) && match(f[1:], n[1:])
	}
	return match(f, n)
}

// universe has all names of up to 4 levels. "other" is in no filter.
var universe = func() (all []string) {
	all = []string{"", "a", "b", "$x", "other"}
	for start, depth := 0, 1; depth < 4; depth++ {
		end := len(all)
		for _, prefix := range all[start:end] {
			for _, level := range []string{"", "a", "b", "$x", "other"} {
				all = append(all, prefix+"/"+level)
			}
		}
		start = end
	}
	return all[1:] // "" is no name
}()

func drawFilter(t *rapid.T, label string) string {
	levels := rapid.SliceOfN(rapid.SampledFrom([]string{"a", "b", "+", "", "$x"}), 1, 3).Draw(t, label)
	if rapid.Bool().Draw(t, label+" ends with #") {
		levels[len(levels)-1] = "#"
	}
	filter := strings.Join(levels, "/")
	if filter == "" {
		return "a"
	}
	return filter
}

func TestMatchOverlapAndCoversAgreeWithTheNaiveMatch(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := drawFilter(t, "a"), drawFilter(t, "b")
		overlap, covers := false, true
		for _, name := range universe {
			inA, inB := naiveMatch(a, name), naiveMatch(b, name)
			if got := names.Match(a, []byte(name)); got != inA {
				t.Fatalf("Match(%q, %q) = %v", a, name, got)
			}
			overlap = overlap || inA && inB
			covers = covers && (inA || !inB)
		}
		testkit.MustEqual(t, names.Overlap(a, b), overlap, "overlap of %q and %q", a, b)
		testkit.MustEqual(t, names.Covers(a, b), covers, "%q covers %q", a, b)
	})
}

func FuzzFilter(f *testing.F) {
	f.Add("a/+/#", []byte("a/b/c"))
	f.Add("$share/g/#", []byte("$share/g"))
	f.Add("+/é", []byte("/é"))
	f.Fuzz(func(t *testing.T, filter string, name []byte) {
		if names.CheckFilter(filter) != nil || names.CheckName(name) != nil {
			return
		}
		match := names.Match(filter, name)
		testkit.Equal(t, match, naiveMatch(filter, string(name)), filter, string(name))
		testkit.Equal(t, names.Overlap(filter, string(name)), match, "a name overlaps as it matches")
		testkit.Equal(t, names.Covers(filter, string(name)), match, "a name is covered as it matches")
		testkit.Equal(t, names.Covers(filter, filter), true, "a filter covers itself")
	})
}

func TestMatchDoesNotAllocate(t *testing.T) {
	name := bytes.Repeat([]byte("level/"), 20)
	if got := testing.AllocsPerRun(100, func() {
		_ = names.CheckName(name) == nil && names.Match("level/+/level/#", name)
	}); got > 0 {
		t.Errorf("%v allocations", got)
	}
}
