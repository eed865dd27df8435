package server

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/store"
	"github.com/srtm-io/srtm/admission/table"
)

// memory is a store in memory that keeps the contract of store.Store by other means. A property of
// servers holds on both stores.
type memory struct {
	rules   map[string]rule.Rule
	edits   []store.Change // in order
	credits map[string]table.Credit
	members map[string]store.Member
	at      map[string]time.Duration // of members
	latest  time.Duration
	parts   []store.Partition
	number  uint64
}

func newMemory(rules []rule.Rule) *memory {
	m := &memory{
		rules: map[string]rule.Rule{}, credits: map[string]table.Credit{}, members: map[string]store.Member{},
		at: map[string]time.Duration{}, parts: make([]store.Partition, rule.Partitions),
	}
	for _, r := range rules {
		m.rules[r.Key] = r
	}
	return m
}

// edit records the next edit.
func (m *memory) edit(r rule.Rule, deleted bool) {
	r.Change = uint64(len(m.edits)) + 1
	m.edits = append(m.edits, store.Change{Rule: r, Deleted: deleted})
	if m.rules[r.Key] = r; deleted {
		delete(m.rules, r.Key)
	}
}

func (m *memory) SetRules(_ context.Context, rules []rule.Rule) (uint64, error) {
	for _, r := range rules {
		m.edit(r, false)
	}
	return uint64(len(m.edits)), nil
}

func (m *memory) DeleteRule(_ context.Context, key string) (uint64, error) {
	r, ok := m.rules[key]
	if !ok {
		return 0, store.ErrNoRule
	}
	m.edit(r, true)
	return uint64(len(m.edits)), nil
}

func millis(d time.Duration) time.Duration {
	return (d + time.Millisecond - 1) / time.Millisecond * time.Millisecond
}

func (m *memory) RulesOf(_ context.Context, keys []string) (map[string]rule.Rule, error) {
	return those(m.rules, keys), nil
}

func (m *memory) Credits(_ context.Context, keys []string) (map[string]table.Credit, error) {
	return those(m.credits, keys), nil
}

func those[T any](all map[string]T, keys []string) map[string]T {
	some := map[string]T{}
	for _, key := range keys {
		if v, ok := all[key]; ok {
			some[key] = v
		}
	}
	return some
}

func (m *memory) Defaults(context.Context) (all []rule.Rule, err error) {
	for _, r := range m.rules {
		if r.Default() {
			all = append(all, r)
		}
	}
	return all, nil
}

func (m *memory) LastChange(context.Context) (uint64, error) { return uint64(len(m.edits)), nil }

// Changes returns all edits of a rule. store.Store returns only the last edit.
func (m *memory) Changes(_ context.Context, after uint64, n int) ([]store.Change, error) {
	return m.edits[after:min(after+uint64(n), uint64(len(m.edits)))], nil
}

func (m *memory) mine(me store.Member) bool {
	is, ok := m.members[me.Address]
	return ok && is.Instance == me.Instance && is.Heartbeat >= me.Heartbeat
}

func (m *memory) heartbeat(me store.Member) {
	is := m.members[me.Address]
	is.Heartbeat++
	m.members[me.Address] = is
}

func (m *memory) save(me store.Member, credits []table.Credit) {
	m.heartbeat(me)
	for _, c := range credits {
		c.At = millis(c.At)
		m.at[me.Address] = max(m.at[me.Address], c.At)
		if is, ok := m.credits[c.Key]; !ok || c.At > is.At || c.At == is.At && c.Credits < is.Credits {
			m.credits[c.Key] = c
		}
	}
}

func (m *memory) SaveCredits(_ context.Context, me store.Member, owners uint64, credits []table.Credit) error {
	if !m.mine(me) {
		return store.ErrFenced
	}
	if owners != m.number {
		return store.ErrMoved
	}
	m.save(me, credits)
	return nil
}

func (m *memory) Saved(_ context.Context, after string, n int) (saved []store.Saved, err error) {
	for key, c := range m.credits {
		if r, own := m.rules[key]; key > after {
			saved = append(saved, store.Saved{Credit: c, Own: own, Rule: r})
		}
	}
	slices.SortFunc(saved, func(a, b store.Saved) int {
		if a.Key < b.Key {
			return -1
		}
		return 1
	})
	return saved[:min(n, len(saved))], nil
}

func (m *memory) Forget(_ context.Context, credits []table.Credit) error {
	for _, c := range credits {
		if m.credits[c.Key] == c {
			delete(m.credits, c.Key)
		}
	}
	return nil
}

// time is store.latest.
func (m *memory) time(wall time.Duration) time.Duration {
	for _, at := range m.at {
		m.latest = max(m.latest, at)
	}
	m.latest = max(m.latest+time.Millisecond, millis(wall))
	return m.latest
}

func (m *memory) take(me, from string, lost time.Duration) {
	for i := range m.parts {
		if p := &m.parts[i]; p.Owner == from {
			*p = store.Partition{Owner: me, Epoch: p.Epoch + 1, Lost: max(p.Lost, lost)}
		}
	}
}

func (m *memory) leave(address string) {
	delete(m.members, address)
	delete(m.at, address)
}

func (m *memory) Join(_ context.Context, me store.Member, wall func() time.Duration) (time.Duration, error) {
	m.number++
	lost, at := time.Duration(0), m.time(wall())
	if was, ok := m.members[me.Address]; ok {
		if lost = at + store.Lease; was.Follower != 0 && was.Follower != me.Follower {
			lost = at + store.FollowerLease
		}
	}
	m.members[me.Address], m.at[me.Address] = store.Member{Address: me.Address, Instance: me.Instance, Heartbeat: 1, Replicate: me.Replicate}, at
	m.take(me.Address, me.Address, lost)
	m.take(me.Address, "", 0)
	return at, nil
}

func (m *memory) Renew(_ context.Context, me store.Member) (members []store.Member, owners uint64, err error) {
	if !m.mine(me) {
		return nil, 0, store.ErrFenced
	}
	m.heartbeat(me)
	is := m.members[me.Address]
	is.Follower = me.Follower
	m.members[me.Address] = is
	members, _ = m.Members(context.Background())
	return members, m.number, nil
}

func (m *memory) Members(context.Context) (members []store.Member, err error) {
	for _, address := range slices.Sorted(maps.Keys(m.members)) {
		members = append(members, m.members[address])
	}
	return members, nil
}

func (m *memory) Claim(_ context.Context, me, from, follower store.Member, wall time.Duration) (time.Duration, error) {
	if !m.mine(me) {
		return 0, store.ErrFenced
	}
	is, there := m.members[from.Address]
	if follower.Instance != 0 && m.members[follower.Address] != follower || there && is != from || !there && from.Instance != 0 {
		return 0, store.ErrMoved
	}
	m.number++
	m.heartbeat(me)
	at, lost := m.time(wall), time.Duration(0)
	if there {
		lost = at
	}
	m.leave(from.Address)
	m.take(me.Address, from.Address, lost)
	return at, nil
}

func (m *memory) Owners(context.Context) (all []store.Partition, number uint64, err error) {
	return slices.Clone(m.parts), m.number, nil
}

func (m *memory) HandOver(_ context.Context, me store.Member, to string, partitions []int, credits []table.Credit) error {
	if !m.mine(me) {
		return store.ErrFenced
	}
	if _, ok := m.members[to]; !ok {
		return store.ErrNoServer
	}
	m.number++
	m.save(me, credits)
	for _, p := range partitions {
		if m.parts[p].Owner == me.Address {
			m.parts[p] = store.Partition{Owner: to, Epoch: m.parts[p].Epoch + 1, Lost: m.parts[p].Lost}
		}
	}
	return nil
}

func (m *memory) Leave(_ context.Context, me store.Member) error {
	if !m.mine(me) {
		return store.ErrFenced
	}
	m.number++
	m.time(0)
	m.leave(me.Address)
	return nil
}

func (m *memory) Move(_ context.Context, first, last int, to string) error {
	if _, ok := m.members[to]; !ok {
		return store.ErrNoServer
	}
	m.number++
	for i := first; i <= last; i++ {
		if m.parts[i].Target = to; m.parts[i].Owner == to {
			m.parts[i].Target = ""
		}
	}
	return nil
}
