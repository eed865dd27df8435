package rule

import (
	"cmp"
	"slices"
)

// Defaults finds the rule for a key that has none of its own. The zero value has
// no default; it is changed by Set and Delete only, and not safe for concurrent use.
type Defaults struct {
	byPrefix map[string]Rule
	lengths  []int // of the prefixes, each once, the longest first
}

// Set adds or replaces a default. Requires: r.Default().
func (d *Defaults) Set(r Rule) {
	if d.byPrefix == nil {
		d.byPrefix = make(map[string]Rule)
	}
	d.byPrefix[prefix(r.Key)] = r
	d.measure()
}

// Delete removes the default with that key.
func (d *Defaults) Delete(key string) {
	delete(d.byPrefix, prefix(key))
	d.measure()
}

// For returns the default with the longest prefix of the key. Without one it is the
// zero Rule, which denies.
func (d *Defaults) For(key string) Rule {
	for _, n := range d.lengths {
		if n > len(key) {
			continue
		}
		if r, ok := d.byPrefix[key[:n]]; ok {
			return r
		}
	}
	return Rule{}
}

func (d *Defaults) measure() {
	d.lengths = d.lengths[:0]
	// order: sorted below
	for p := range d.byPrefix {
		d.lengths = append(d.lengths, len(p))
	}
	slices.SortFunc(d.lengths, func(a, b int) int { return cmp.Compare(b, a) })
	d.lengths = slices.Compact(d.lengths)
}

func prefix(key string) string { return key[:len(key)-1] }
