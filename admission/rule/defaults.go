package rule

// Defaults finds the rule for a key without a rule of its own. The zero value has no defaults. Not safe
// for concurrent use with Set or Delete.
type Defaults struct {
	byLength [MaxKey]map[string]Rule // by length of the prefix, then by prefix
}

// Set adds or replaces a default. Requires: r.Default().
func (d *Defaults) Set(r Rule) {
	prefix := r.Key[:len(r.Key)-1]
	prefixes := &d.byLength[len(prefix)]
	if *prefixes == nil {
		*prefixes = make(map[string]Rule)
	}
	(*prefixes)[prefix] = r
}

// Delete removes the default with the given key.
func (d *Defaults) Delete(key string) {
	prefix := key[:len(key)-1]
	delete(d.byLength[len(prefix)], prefix)
}

// For returns the default with the longest prefix of key. If there is none, For returns the zero Rule,
// which denies.
func (d *Defaults) For(key string) Rule {
	for n := min(len(key), MaxKey-1); n >= 0; n-- {
		if r, ok := d.byLength[n][key[:n]]; ok {
			return r
		}
	}
	return Rule{}
}
