package rule

// Defaults finds the rule for a key that has none of its own. The zero value has
// no default; it is changed by Set and Delete only, and not safe for concurrent use.
type Defaults struct {
	byLength [MaxKey]map[string]Rule // of the prefix; then by that
}

// Set adds or replaces a default. Requires: r.Default().
func (d *Defaults) Set(r Rule) {
	prefix := r.Key[:len(r.Key)-1]
	of := &d.byLength[len(prefix)]
	if *of == nil {
		*of = make(map[string]Rule)
	}
	(*of)[prefix] = r
}

// Delete removes the default with that key.
func (d *Defaults) Delete(key string) {
	prefix := key[:len(key)-1]
	delete(d.byLength[len(prefix)], prefix)
}

// For returns the default with the longest prefix of the key. Without one it is the
// zero Rule, which denies.
func (d *Defaults) For(key string) Rule {
	for n := min(len(key), MaxKey-1); n >= 0; n-- {
		if r, ok := d.byLength[n][key[:n]]; ok {
			return r
		}
	}
	return Rule{}
}
