package placement

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"sort"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/srtm-io/srtm/tokenbucket"
)

// Broker is one broker of the snapshot.
type Broker struct {
	ID string
	// Mcap is the maximum rate of the broker within the SLO. Allocated is the rate
	// already allocated. Both are in msg/s and >= 0. The remaining capacity rcap is
	// Mcap-Allocated, or zero if Allocated exceeds Mcap.
	Mcap, Allocated int64
}

func (b Broker) rcap() int64 { return max(0, b.Mcap-b.Allocated) }

// Publisher is one connection: a sensor, or a gateway for several.
type Publisher struct {
	ID string
	// Key is the correlation key: publishers with the same key tend to send at the same
	// time. Publishers with an empty key form the pool, without a known correlation.
	Key string
	// Rate is the mean rate in msg/s; finite and > 0.
	Rate float64
	// Batch is the number of messages sent back to back; 0 means 1.
	Batch int
}

// Group declares Count publishers with the ids "<key>.0" to "<key>.<count-1>", or
// "pool.<i>" if the key is empty.
type Group struct {
	Key   string
	Count int
	Rate  float64 // msg/s of each publisher
	Batch int     // messages of each publisher
	// Weight applies to each publisher of a paced topic, in [1, 255]; 0 means 1. Weight
	// does not influence placement.
	Weight int
}

// Name is the prefix of the publisher ids of g.
func (g Group) Name() string {
	if g.Key == "" {
		return "pool"
	}
	return g.Key
}

// Demand describes the needs of a topic.
type Demand struct {
	Topic string
	// Rate is the contract's r in msg/s, rounded up; the quotas sum to Rate. RateMilli is
	// the exact r in milli-msg/s; the shares sum to RateMilli. 0 means 1000*Rate.
	Rate      int64
	RateMilli int64
	// Burst is the contract's b, in messages.
	Burst int64
	// Publishers and Groups may be empty: then Place plans only quotas and shares. Their
	// rates sum to at most r.
	Publishers []Publisher
	Groups     []Group
	// Open means that the topic may have undeclared publishers. Then the number of
	// publishers does not limit the number of brokers.
	Open bool
	// AtLeast is the minimum number of brokers. It is set if fewer brokers could carry
	// the rate by mcap but did not keep the SLO. 0 and 1 mean as few as possible.
	AtLeast int
}

// Limits of a demand. tokenbucket has the limits of r and b.
const (
	// MaxRate is the maximum of r, in msg/s.
	MaxRate = int64(tokenbucket.MaxRate) / 1000
	// MaxPublishers is the maximum number of publishers of a demand, including groups.
	MaxPublishers = 1_000_000
	// MaxBatch is the maximum Batch of a publisher.
	MaxBatch = 1_000_000
	// MaxID is the maximum length of an id or a correlation key in bytes.
	MaxID = 64
)

// FieldError is one fault of a demand or a broker. Field is a path such as
// "rate", "publishers[3].id", "groups[0].count", "brokers[1].mcap" or "policy".
type FieldError struct{ Field, Problem string }

func (e FieldError) Error() string { return e.Field + ": " + e.Problem }

// FieldErrors lists every fault, in the order of the fields.
type FieldErrors []FieldError

// maxShown is the maximum number of faults in an error's text.
const maxShown = 10

func (e FieldErrors) Error() string { return e.Text("; ") }

// Text returns the error's text with the given separator between faults.
func (e FieldErrors) Text(separator string) string {
	var b strings.Builder
	for i, f := range e {
		if i > 0 {
			b.WriteString(separator)
		}
		if i == maxShown {
			fmt.Fprintf(&b, "and %d more", len(e)-maxShown)
			break
		}
		b.WriteString(f.Error())
	}
	return b.String()
}

func (e *FieldErrors) add(field, format string, args ...any) {
	*e = append(*e, FieldError{Field: field, Problem: fmt.Sprintf(format, args...)})
}

// item is an element of a list of the demand. A field's path is built only for a fault,
// because most demands have ten thousand valid publishers.
type item struct {
	list string
	i    int
}

func (at item) field(name string) string { return fmt.Sprintf("%s[%d].%s", at.list, at.i, name) }

// rateMilli returns the exact r, milli-msg/s. Requires: d is valid.
func (d Demand) rateMilli() int64 {
	if d.RateMilli != 0 {
		return d.RateMilli
	}
	return d.Rate * 1000
}

// Expand returns all publishers: first the single publishers, then the members of the
// groups, in the order given. Requires: d is valid.
func (d Demand) Expand() []Publisher {
	publishers := make([]Publisher, 0, d.Count())
	publishers = append(publishers, d.Publishers...)
	for _, g := range d.Groups {
		prefix := g.Name() + "."
		for i := range g.Count {
			publishers = append(publishers, Publisher{ID: prefix + strconv.Itoa(i), Key: g.Key, Rate: g.Rate, Batch: g.Batch})
		}
	}
	return publishers
}

// rates returns the rates of Expand's publishers, by index.
func (d Demand) rates() []float64 {
	rates := make([]float64, 0, d.Count())
	for _, p := range d.Publishers {
		rates = append(rates, p.Rate)
	}
	for _, g := range d.Groups {
		for range g.Count {
			rates = append(rates, g.Rate)
		}
	}
	return rates
}

// Keys counts publishers by correlation key, without the pool. publishers are ascending
// indices into Expand.
func (d Demand) Keys(publishers []int) map[string]int {
	keys := map[string]int{}
	add := func(key string, n int) {
		if key != "" && n > 0 {
			keys[key] += n
		}
	}
	n := 0
	for ; n < len(publishers) && publishers[n] < len(d.Publishers); n++ {
		add(d.Publishers[publishers[n]].Key, 1)
	}
	end := len(d.Publishers)
	for _, g := range d.Groups {
		end += g.Count
		before := n
		for n < len(publishers) && publishers[n] < end {
			n++
		}
		add(g.Key, n-before)
	}
	return keys
}

// Names converts between the ids of a demand's publishers and their indices in Expand.
// Names does not store the ids of group members: it composes and parses them.
type Names struct {
	publishers []Publisher
	groups     []Group
	starts     []int // index of each group's first publisher, then the total number
	byID       map[string]int32
	byName     map[string]int
}

// NewNames indexes the publishers and groups of d. If two publishers have the same id,
// NewNames returns nil and the id as twice.
func NewNames(d Demand) (n *Names, twice string) {
	n = &Names{publishers: d.Publishers, groups: d.Groups, starts: make([]int, 1, len(d.Groups)+1)}
	n.starts[0] = len(d.Publishers)
	if len(d.Groups) > 0 {
		n.byName = make(map[string]int, len(d.Groups))
	}
	for i, g := range d.Groups {
		if _, duplicate := n.byName[g.Name()]; duplicate {
			return nil, g.Name() + ".0"
		}
		n.byName[g.Name()] = i
		n.starts = append(n.starts, n.starts[i]+g.Count)
	}
	if len(d.Publishers) > 0 {
		n.byID = make(map[string]int32, len(d.Publishers))
	}
	for i, p := range d.Publishers {
		if _, duplicate := n.Index(p.ID); duplicate {
			return nil, p.ID
		}
		n.byID[p.ID] = int32(i)
	}
	return n, ""
}

// Len returns the number of publishers.
func (n *Names) Len() int { return n.starts[len(n.groups)] }

// ID returns the id of publisher i. Requires: 0 <= i < Len.
func (n *Names) ID(i int) string {
	if i < len(n.publishers) {
		return n.publishers[i].ID
	}
	g := sort.SearchInts(n.starts, i+1) - 1
	return n.groups[g].Name() + "." + strconv.Itoa(i-n.starts[g])
}

// Index returns the index of the publisher with the given id, if there is such a
// publisher.
func (n *Names) Index(id string) (i int, found bool) {
	if i, found := n.byID[id]; found {
		return int(i), true
	}
	g, i, found := named(n.byName, n.groups, id)
	if !found {
		return 0, false
	}
	return n.starts[g] + i, true
}

// bound returns the number of publishers if it limits the number of brokers, or 0 for an
// open topic.
func (d Demand) bound() int {
	if d.Open {
		return 0
	}
	return d.Count()
}

// Count returns the number of publishers.
func (d Demand) Count() int {
	n := len(d.Publishers)
	for _, g := range d.Groups {
		n += g.Count
	}
	return n
}

// Validate returns all faults of d at once, as FieldErrors, or nil.
func (d Demand) Validate() error {
	if faults := d.faults(); len(faults) > 0 {
		return faults
	}
	return nil
}

func (d Demand) faults() (faults FieldErrors) {
	if d.Topic == "" {
		faults.add("topic", "is empty")
	}
	switch exact := d.RateMilli; {
	case d.Rate < 1 || d.Rate > MaxRate:
		faults.add("rate", "%d msg/s is outside 1 to %d", d.Rate, MaxRate)
	case exact < 0:
		faults.add("rate", "%d milli-msg/s is negative", exact)
	case exact != 0 && d.Rate != (exact+999)/1000:
		faults.add("rate", "%d msg/s is not %d milli-msg/s rounded up", d.Rate, exact)
	}
	if d.Burst < 1 || d.Burst > tokenbucket.MaxBurst {
		faults.add("burst", "%d messages is outside 1 to %d", d.Burst, tokenbucket.MaxBurst)
	}
	if d.AtLeast < 0 {
		faults.add("at_least", "%d brokers is negative", d.AtLeast)
	}
	sound := len(faults) == 0

	count := len(d.Publishers)
	total := 0.0
	byID := make(map[string]int, len(d.Publishers))
	for i := len(d.Publishers) - 1; i >= 0; i-- {
		byID[d.Publishers[i].ID] = i // the first publisher with this id
	}
	unique := len(byID) == len(d.Publishers)
	for i, p := range d.Publishers {
		place := item{"publishers", i}
		if !unique && byID[p.ID] != i {
			faults.add(place.field("id"), "%q is the id of publishers[%d] too", p.ID, byID[p.ID])
		}
		if p.ID == "" {
			faults.add(place.field("id"), "is empty")
		}
		checkText(&faults, place, "id", p.ID)
		checkText(&faults, place, "key", p.Key)
		checkRate(&faults, place, "rate", p.Rate)
		checkBatch(&faults, place, "batch", p.Batch)
		total += p.Rate
	}

	byName := make(map[string]int, len(d.Groups))
	for i, g := range d.Groups {
		place := item{"groups", i}
		if first, twice := byName[g.Name()]; twice {
			faults.add(place.field("key"), "%q would name its publishers %s.<i> as groups[%d] does", g.Key, g.Name(), first)
		} else {
			byName[g.Name()] = i
		}
		if g.Count < 1 || g.Count > MaxPublishers {
			faults.add(place.field("count"), "%d is outside 1 to %d", g.Count, MaxPublishers)
		} else {
			if last := len(g.Name()) + len(strconv.Itoa(g.Count-1)) + 1; last > MaxID {
				faults.add(place.field("key"), "its publishers' ids would have %d bytes, at most %d", last, MaxID)
			}
			count += g.Count
		}
		checkText(&faults, place, "key", g.Key)
		checkRate(&faults, place, "rate", g.Rate)
		checkBatch(&faults, place, "batch", g.Batch)
		total += float64(g.Count) * g.Rate
	}
	for i, p := range d.Publishers {
		if g, _, ok := named(byName, d.Groups, p.ID); ok {
			faults.add(item{"publishers", i}.field("id"), "%q is the id of a publisher of groups[%d] too", p.ID, g)
		}
	}
	if count > MaxPublishers {
		faults.add("publishers", "%d with those of the groups, at most %d", count, MaxPublishers)
	}
	// Rates are sums of decimal fractions: allow for rounding.
	if r := float64(d.Rate); sound && len(faults) == 0 {
		if d.RateMilli != 0 {
			r = float64(d.RateMilli) / 1000
		}
		if total > r*(1+1e-9) {
			faults.add("rate", "the publishers' rates sum to %g msg/s, more than the contract's %g", total, r)
		}
	}
	return faults
}

// named returns the group that contains the publisher with this id, and the publisher's
// index in the group.
func named(byName map[string]int, groups []Group, id string) (group, i int, ok bool) {
	dot := strings.LastIndexByte(id, '.')
	if dot < 0 {
		return 0, 0, false
	}
	group, ok = byName[id[:dot]]
	if !ok {
		return 0, 0, false
	}
	number := id[dot+1:]
	i, err := strconv.Atoi(number)
	plain := err == nil && number[0] != '+' && number[0] != '-' && (number[0] != '0' || number == "0")
	return group, i, plain && i < groups[group].Count
}

func checkText(faults *FieldErrors, place item, field string, text string) {
	if len(text) > MaxID {
		faults.add(place.field(field), "has %d bytes, at most %d", len(text), MaxID)
	} else if !utf8.ValidString(text) {
		faults.add(place.field(field), "%q is not valid UTF-8", text)
	}
}

func checkRate(faults *FieldErrors, place item, field string, rate float64) {
	if math.IsNaN(rate) || math.IsInf(rate, 0) || rate <= 0 {
		faults.add(place.field(field), "%v is not a finite rate above 0", rate)
	}
}

func checkBatch(faults *FieldErrors, place item, field string, batch int) {
	if batch < 0 || batch > MaxBatch {
		faults.add(place.field(field), "%d messages is outside 0 to %d", batch, MaxBatch)
	}
}

func brokerFaults(brokers []Broker) (faults FieldErrors) {
	var byID map[string]int // nil if the brokers are sorted, as from a catalog: then no id repeats
	if !slices.IsSortedFunc(brokers, func(a, b Broker) int { return cmp.Or(cmp.Compare(a.ID, b.ID), -1) }) {
		byID = make(map[string]int, len(brokers))
	}
	for i, b := range brokers {
		place := item{"brokers", i}
		if first, twice := byID[b.ID]; twice {
			faults.add(place.field("id"), "%q is the id of brokers[%d] too", b.ID, first)
		} else if byID != nil {
			byID[b.ID] = i
		}
		if b.ID == "" {
			faults.add(place.field("id"), "is empty")
		}
		if b.Mcap < 0 {
			faults.add(place.field("mcap"), "%d msg/s is negative", b.Mcap)
		}
		if b.Allocated < 0 {
			faults.add(place.field("allocated"), "%d msg/s is negative", b.Allocated)
		}
	}
	return faults
}
