package policy

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// table is a table of the file.
type table struct {
	*reader
	name string // as faults call it; "" for the file itself
	line int    // of its header, from 1; 0 where it has none
	has  map[string]any
	used []string // the keys that mean something
}

// fault notes what is wrong with a key, "" for the table itself.
func (t *table) fault(key, format string, args ...any) {
	where := t.name
	if key != "" {
		where = strings.TrimPrefix(where+", "+key, ", ")
	}
	text := where + ": " + fmt.Sprintf(format, args...)
	if line := t.lineOf(key); line > 0 {
		text = fmt.Sprintf("line %d: %s", line, text)
	}
	t.faults = append(t.faults, faultError(text))
}

// faultError is one fault.
type faultError string

func (e faultError) Error() string { return string(e) }

// lineOf returns the line of a key, that of the table's header if the key is not found
// there (it may be written inline or dotted), 0 if there is none either.
func (t *table) lineOf(key string) int {
	for i := t.line; i < len(t.lines) && key != ""; i++ {
		line := strings.TrimSpace(t.lines[i])
		if strings.HasPrefix(line, "[") {
			break
		}
		if name, _, ok := strings.Cut(line, "="); ok && strings.Trim(name, " \t\"'") == key {
			return i + 1
		}
	}
	return t.line
}

// find returns the line of the n-th header, from 0, or 0 if there is none.
func (r *reader) find(n int, header string) int {
	for i, line := range r.lines {
		line, _, _ = strings.Cut(line, "#")
		if strings.Join(strings.Fields(line), "") != header {
			continue
		}
		if n--; n < 0 {
			return i + 1
		}
	}
	return 0
}

// get returns the value of a key, or what stands for it if it is missing or of another type.
func get[T any](t *table, key string, missing T) T {
	t.used = append(t.used, key)
	v, ok := t.has[key]
	if !ok {
		return missing
	}
	got, ok := v.(T)
	if !ok {
		kinds := map[string]string{"string": "a text in quotes", "int64": "a whole number", "[]interface {}": "a list", "map[string]interface {}": "a table"}
		t.fault(key, "%s is not %s", show(v), kinds[fmt.Sprintf("%T", missing)])
		return missing
	}
	return got
}

// show returns a value as faults show it.
func show(v any) string { return fmt.Sprintf("%.100s", fmt.Sprint(v)) }

func (t *table) text(key, missing string) string {
	s := get(t, key, missing)
	if len(s) > maxText || !utf8.ValidString(s) || strings.ContainsFunc(s, func(c rune) bool { return c < ' ' || c == 0x7f }) {
		t.fault(key, "more than %d bytes, or a control character", maxText)
		return missing
	}
	return s
}

func (t *table) integer(key string, missing, lowest, highest int64) int64 {
	n := get(t, key, missing)
	if n < lowest || n > highest {
		t.fault(key, "%d is outside %d .. %d", n, lowest, highest)
	}
	return n
}

func (t *table) duration(key string, missing, highest time.Duration) time.Duration {
	s := t.text(key, missing.String())
	d, err := time.ParseDuration(s)
	if err != nil || d <= 0 || d > highest {
		t.fault(key, `%q is no duration above 0 and up to %v, as "2s" is`, s, highest)
	}
	return d
}

func (t *table) texts(key string) []string {
	var all []string
	for _, v := range get(t, key, []any(nil)) {
		s, ok := v.(string)
		if !ok || s == "" || len(s) > maxText {
			t.fault(key, "%s is not a text in quotes", show(v))
			continue
		}
		all = append(all, s)
	}
	return all
}

// tables returns the tables of a list, written as [[key]] or inline.
func (t *table) tables(key string) []*table {
	t.used = append(t.used, key)
	var all []*table
	add := func(has map[string]any) {
		n := len(all)
		name, line := fmt.Sprintf("[[%s]] %d", key, n+1), t.find(n, "[["+key+"]]")
		if t.name != "" {
			name, line = fmt.Sprintf("%s, %s %d", t.name, key, n+1), t.lineOf(key)
		}
		all = append(all, &table{reader: t.reader, name: name, line: cmp.Or(line, t.lineOf(key)), has: has})
	}
	switch v := t.has[key].(type) {
	case nil:
	case []map[string]any:
		for _, has := range v {
			add(has)
		}
	case []any:
		for _, e := range v {
			has, ok := e.(map[string]any)
			if !ok {
				t.fault(key, "%s is not a table", show(e))
				continue
			}
			add(has)
		}
	default:
		t.fault(key, "%s is not a list of tables", show(v))
	}
	if len(all) > maxTables {
		t.fault(key, "%d, more than %d", len(all), maxTables)
		return nil
	}
	return all
}

// units returns the numbers of a server or a cost, by resource.
func (t *table) units(resources []string) []float64 {
	units := make([]float64, len(resources))
	for i, name := range resources {
		v, ok := t.has[name]
		if !ok {
			continue
		}
		switch v := v.(type) {
		case int64:
			units[i] = float64(v)
		case float64:
			units[i] = v
		default:
			t.fault(name, "%s is not a number of units", show(v))
			continue
		}
		if !(units[i] > 0 && units[i] <= maxUnits) {
			t.fault(name, "%v is outside 0 (not included) .. %g", v, float64(maxUnits))
		}
	}
	t.used = append(t.used, resources...)
	return units
}

func (t *table) prefix(path string) {
	if clean(path) != path {
		t.fault("path", "%q can match nothing: a path begins with / and has no empty, . or .. element", path)
	}
}

// done notes the keys that mean nothing.
func (t *table) done() {
	for _, key := range slices.Sorted(maps.Keys(t.has)) {
		if !slices.Contains(t.used, key) {
			t.fault(key, "unknown key")
		}
	}
}
