package store_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/store"
	"github.com/srtm-io/srtm/admission/table"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

func TestSQLite(t *testing.T) {
	// A name that a URL parser would read differently.
	suite(t, filepath.Join(t.TempDir(), "a b?#%20.db"))
}

// A server looks up keys while a write waits for the disk.
func TestReadsDoNotWaitForAWrite(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Hang)
	defer cancel()
	s := testkit.Result(store.Open(ctx, filepath.Join(t.TempDir(), "admission.db"))).Must(t)
	defer s.Close()
	testkit.Result(s.SetRules(ctx, []rule.Rule{{Key: "key", Share: tokenbucket.Share{Rate: 1000, Burst: 1}}})).Must(t)
	release := s.Hold(ctx)
	rules, err := s.RulesOf(ctx, []string{"key"})
	if err != nil || len(rules) != 1 {
		t.Errorf("rules %v, %v", rules, err)
	}
	_, err = s.Credits(ctx, []string{"key"})
	testkit.Must(t, err)
	_, _, err = s.Owners(ctx)
	testkit.Must(t, err)
	testkit.Must(t, release())
}

func suite(t *testing.T, database string) {
	ctx := context.Background()
	s := testkit.Result(store.Open(ctx, database)).Must(t)
	defer func() { s.Close() }()
	rules := []rule.Rule{
		{Key: "user/1", Share: tokenbucket.Share{Rate: 100_000, Burst: 10}},
		{Key: "user/2", Share: tokenbucket.Share{Rate: 1e12, Burst: 1e9}, Strict: true, Shadow: true, FailOpen: true},
		{Key: "user/*", Share: tokenbucket.Share{Rate: 1, Burst: 1}},
		{Key: "Ü%_'\"/*"},
		{Key: "deny"},
	}
	change, err := s.SetRules(ctx, rules)
	if err != nil || change != uint64(len(rules)) {
		t.Fatal(change, err)
	}
	for i := range rules {
		rules[i].Change = uint64(i + 1)
		testkit.Result(s.Rule(ctx, rules[i].Key)).Equal(t, rules[i])
	}
	// All rules are written, or none.
	if _, err := s.SetRules(ctx, []rule.Rule{{Key: "fine"}, {Key: "k", Share: tokenbucket.Share{Burst: 1}}}); err == nil {
		t.Error("a rule that is none was taken")
	}
	_, err = s.Rule(ctx, "fine")
	testkit.ErrorIs(t, err, store.ErrNoRule, "half of what was refused was taken")

	defaults, err := s.Defaults(ctx)
	if got := keys(defaults); err != nil || got != "user/* Ü%_'\"/*" {
		t.Errorf("defaults %q, %v", got, err)
	}
	for _, test := range []struct {
		prefix, after string
		n             int
		want          string
	}{
		{"", "", 10, "deny user/* user/1 user/2 Ü%_'\"/*"},
		{"", "", 2, "deny user/*"},
		{"", "user/*", 2, "user/1 user/2"},
		{"user/", "user/1", 10, "user/2"},
		{"Ü%", "", 10, "Ü%_'\"/*"},
		{"u%", "", 10, ""},
	} {
		got, err := s.Rules(ctx, test.prefix, test.after, test.n)
		if err != nil || keys(got) != test.want {
			t.Errorf("rules %q after %q: %q, %v, want %q", test.prefix, test.after, keys(got), err, test.want)
		}
	}

	// Edits and deletions are each seen once, in order.
	testkit.Result(s.DeleteRule(ctx, "user/1")).Must(t)
	_, err = s.DeleteRule(ctx, "user/1")
	testkit.ErrorIs(t, err, store.ErrNoRule, "deleted twice")
	testkit.Result(s.LastChange(ctx)).Equal(t, 6, "last change")
	rules[4].Shadow = true
	testkit.Result(s.SetRules(ctx, rules[4:])).Must(t)
	changes, err := s.Changes(ctx, 5, 10)
	if err != nil || len(changes) != 2 || !changes[0].Deleted || changes[0].Rule.Key != "user/1" || changes[0].Rule.Change != 6 ||
		changes[1].Deleted || changes[1].Rule.Key != "deny" || !changes[1].Rule.Shadow || changes[1].Rule.Change != 7 {
		t.Errorf("%+v, %v", changes, err)
	}
	_, err = s.Rule(ctx, "user/1")
	testkit.ErrorIs(t, err, store.ErrNoRule, "deleted")
	if _, err := s.SetRules(ctx, rules[:1]); err != nil { // the same rules may come again
		t.Fatal(err)
	}
	_, err = s.Rule(ctx, "user/1")
	testkit.NoError(t, err)
	// A deletion is forgotten after a while by the database's clock, and never earlier.
	for _, key := range []string{"user/1", "user/*"} {
		testkit.Result(s.DeleteRule(ctx, key)).Must(t)
	}
	if changes, err = s.Changes(ctx, 8, 10); err != nil || len(changes) != 2 {
		t.Errorf("%+v, %v", changes, err)
	}
	testkit.Must(t, s.Age(ctx, store.Remembered+time.Minute))
	testkit.Result(s.DeleteRule(ctx, "user/2")).Must(t)
	changes, err = s.Changes(ctx, 7, 10)
	if err != nil || len(changes) != 1 || changes[0].Rule.Key != "user/2" {
		t.Errorf("%+v, %v", changes, err)
	}

	// Writes more credits than one statement takes, and writes them again.
	me := store.Member{Address: "me", Instance: 1}
	testkit.Result(s.Join(ctx, me, at(0))).Must(t)
	_, number, err := s.Owners(ctx)
	testkit.Must(t, err)
	var credits []table.Credit
	for i := range 1201 {
		credits = append(credits, table.Credit{Key: fmt.Sprint("k", i), Credits: tokenbucket.Tokens(i), At: time.Duration(i)*time.Millisecond - 1})
	}
	for range 2 {
		testkit.Must(t, s.SaveCredits(ctx, me, number, credits))
		credits[1200].Credits = 7
	}
	// Only keys that have not changed since the read are forgotten.
	was, err := s.Saved(ctx, "k0", 3)
	if err != nil || was[0].Key+" "+was[1].Key+" "+was[2].Key != "k1 k10 k100" {
		t.Fatal(was, err)
	}
	testkit.Must(t, s.SaveCredits(ctx, me, number, []table.Credit{{Key: "k10", Credits: 10, At: 11 * time.Millisecond}}))
	testkit.Must(t, s.Forget(ctx, []table.Credit{was[0].Credit, was[1].Credit}))
	if left, err := s.Saved(ctx, "k0", 2); err != nil || left[0].Key != "k10" || left[0].At != 11*time.Millisecond || left[1].Key != "k100" {
		t.Error(left, err)
	}
	testkit.Must(t, s.Close())
	if s, err = store.Open(ctx, database); err != nil { // everything is there after a restart
		t.Fatal(err)
	}
	credits[1200].At = 1200 * time.Millisecond // rounded up, so that the key earns no more
	if c, err := savedOf(s, "k1200"); err != nil || !reflect.DeepEqual(*c, credits[1200]) {
		t.Errorf("%+v, %v", c, err)
	}
	if c, err := savedOf(s, "never written"); err != nil || c != nil {
		t.Errorf("%+v, %v", c, err)
	}
	testkit.Result(s.LastChange(ctx)).Equal(t, 11, "last change")
}

func at(wall time.Duration) func() time.Duration {
	return func() time.Duration { return wall }
}

func TestOwners(t *testing.T) {
	owners(t, filepath.Join(t.TempDir(), "admission.db"))
}

// Checks who owns what through starts, crashes, takeovers and moves. A step names an operation. Then
// the test compares the owner, the epoch and the losses of partition 0.
func owners(t *testing.T, database string) {
	ctx := context.Background()
	s := testkit.Result(store.Open(ctx, database)).Must(t)
	defer s.Close()
	const hour = int(time.Hour / time.Millisecond)
	ms := func(n int) time.Duration { return time.Duration(n) * time.Millisecond }
	a, a2, b := store.Member{Address: "a", Instance: 1}, store.Member{Address: "a", Instance: 2}, store.Member{Address: "b", Instance: 3}
	credit := func(at int) []table.Credit { return []table.Credit{{Key: "k", Credits: 1, At: ms(at)}} }
	var number uint64 // number of the owners before a step
	save := func(me store.Member, at int) (time.Duration, error) {
		return 0, s.SaveCredits(ctx, me, number, credit(at))
	}
	before, err := s.LastChange(ctx)
	testkit.Must(t, err)
	for _, step := range []struct {
		what  string
		do    func() (time.Duration, error)
		floor int // ms
		fails error
		owner string
		epoch uint32
		lost  int // ms
	}{
		{"the first one", func() (time.Duration, error) { return s.Join(ctx, a, at(ms(hour))) }, hour, nil, "a", 1, 0},
		{"saves", func() (time.Duration, error) { return save(a, 2*hour) }, 0, nil, "a", 1, 0},
		{"started again after a crash, its clock set back", func() (time.Duration, error) { return s.Join(ctx, a2, at(ms(5))) }, 2*hour + 1, nil, "a", 2, 2*hour + 6001},
		{"the one before writes no more", func() (time.Duration, error) { return save(a, 3*hour) }, 0, store.ErrFenced, "a", 2, 2*hour + 6001},
		{"nor renews", func() (time.Duration, error) { _, _, err := s.Renew(ctx, a); return 0, err }, 0, store.ErrFenced, "a", 2, 2*hour + 6001},
		{"a second one", func() (time.Duration, error) { return s.Join(ctx, b, at(0)) }, 2*hour + 2, nil, "a", 2, 2*hour + 6001},
		{"the first renews", func() (time.Duration, error) { _, _, err := s.Renew(ctx, a2); return 0, err }, 0, nil, "a", 2, 2*hour + 6001},
		{"and so is not replaced", func() (time.Duration, error) {
			return s.Claim(ctx, b, store.Member{Address: "a", Instance: 2, Heartbeat: 1}, store.Member{}, 0)
		}, 2*hour + 3, store.ErrMoved, "a", 2, 2*hour + 6001},
		{"nor as one that has left", func() (time.Duration, error) { return s.Claim(ctx, b, store.Member{Address: "a"}, store.Member{}, 0) }, 2*hour + 3, store.ErrMoved, "a", 2, 2*hour + 6001},
		{"silent, it is", func() (time.Duration, error) {
			return s.Claim(ctx, b, store.Member{Address: "a", Instance: 2, Heartbeat: 2}, store.Member{}, ms(2*hour+7000))
		}, 2*hour + 7000, nil, "b", 3, 2*hour + 7000},
		{"it comes too late", func() (time.Duration, error) { return save(a2, 3*hour) }, 0, store.ErrFenced, "b", 3, 2*hour + 7000},
		{"and cannot take", func() (time.Duration, error) {
			return s.Claim(ctx, a2, store.Member{Address: "b", Instance: 3, Heartbeat: 1}, store.Member{}, 0)
		}, 0, store.ErrFenced, "b", 3, 2*hour + 7000},
		{"nowhere to move", func() (time.Duration, error) { return 0, s.Move(ctx, 0, 9, "a") }, 0, store.ErrNoServer, "b", 3, 2*hour + 7000},
		{"it begins again", func() (time.Duration, error) { return s.Join(ctx, a2, at(0)) }, 2*hour + 7001, nil, "b", 3, 2*hour + 7000},
		{"an operator moves", func() (time.Duration, error) { return 0, s.Move(ctx, 0, 9, "a") }, 0, nil, "b", 3, 2*hour + 7000},
		{"its owner does", func() (time.Duration, error) { return 0, s.HandOver(ctx, b, "a", []int{0}, credit(3*hour)) }, 0, nil, "a", 4, 2*hour + 7000},
		{"once", func() (time.Duration, error) { return 0, s.HandOver(ctx, b, "b", []int{0}, nil) }, 0, nil, "a", 4, 2*hour + 7000},
		{"what it receives late it does not write", func() (time.Duration, error) {
			return 0, s.SaveCredits(ctx, b, number-1, credit(4*hour))
		}, 0, store.ErrMoved, "a", 4, 2*hour + 7000},
		{"it leaves", func() (time.Duration, error) { return 0, s.Leave(ctx, a2) }, 0, nil, "a", 4, 2*hour + 7000},
		{"and nothing is lost", func() (time.Duration, error) { return s.Claim(ctx, b, store.Member{Address: "a"}, store.Member{}, 0) }, 3*hour + 2, nil, "b", 5, 2*hour + 7000},
	} {
		if floor, err := step.do(); !errors.Is(err, step.fails) || floor != ms(step.floor) {
			t.Errorf("%s: %v, %v, want %v, %v", step.what, floor.Milliseconds(), err, step.floor, step.fails)
		}
		var all []store.Partition
		if all, number, err = s.Owners(ctx); err != nil || len(all) != rule.Partitions {
			t.Fatal(len(all), err)
		}
		if p := all[0]; p.Owner != step.owner || p.Epoch != step.epoch || p.Lost != ms(step.lost) {
			t.Errorf("%s: %+v, want %+v", step.what, p, step)
		}
	}
	if c, err := savedOf(s, "k"); err != nil || c.At != ms(3*hour) {
		t.Errorf("what was handed over: %+v, %v", c, err)
	}
	all, number, err := s.Owners(ctx)
	if err != nil || all[1].Owner != "b" || all[1].Target != "a" || all[10].Target != "" {
		t.Errorf("%+v, %v", all[:11], err)
	}
	members, is, err := s.Renew(ctx, b)
	if err != nil || is != number || fmt.Sprint(members) != "[{b 3 6  0}]" {
		t.Errorf("%v, %d, want %d, %v", members, is, number, err)
	}
	testkit.Result(s.LastChange(ctx)).Equal(t, before, "no rule was edited, and the last change")
}

func TestFollowers(t *testing.T) {
	followers(t, filepath.Join(t.TempDir(), "admission.db"))
}

// Checks how long the credits of a process with a follower stay lost, and which process may claim the
// credits.
func followers(t *testing.T, database string) {
	ctx := context.Background()
	s, err := store.Open(ctx, database)
	testkit.Must(t, err)
	defer s.Close()
	join := func(m store.Member) time.Duration {
		t.Helper()
		return testkit.Result(s.Join(ctx, m, at(0))).Must(t)
	}
	renew := func(m store.Member) map[string]store.Member {
		t.Helper()
		members, _, err := s.Renew(ctx, m)
		testkit.Must(t, err)
		is := map[string]store.Member{}
		for _, m := range members {
			is[m.Address] = m
		}
		return is
	}
	first := func() store.Partition {
		t.Helper()
		all, _, err := s.Owners(ctx)
		testkit.Must(t, err)
		return all[0]
	}
	follower := store.Member{Address: "zf", Instance: 1_000, Replicate: "zf:1"}
	join(store.Member{Address: "zo", Instance: 1})
	join(follower)
	renew(store.Member{Address: "zo", Instance: 1, Follower: 1_000})
	testkit.Equal(t, renew(follower)["zo"], (store.Member{Address: "zo", Instance: 1, Heartbeat: 2, Follower: 1_000}))
	floor := join(store.Member{Address: "zo", Instance: 2, Follower: 1_000})
	if p := first(); p.Lost != floor+store.Lease {
		t.Errorf("lost until %v after a start that the follower knows of", p.Lost-floor)
	}
	renew(store.Member{Address: "zo", Instance: 2, Follower: 1_000})
	floor = join(store.Member{Address: "zo", Instance: 3, Follower: 999})
	if p := first(); p.Lost != floor+store.FollowerLease {
		t.Errorf("lost until %v after a start that the follower does not know of", p.Lost-floor)
	}
	third := store.Member{Address: "zt", Instance: 3}
	join(third)
	renew(store.Member{Address: "zo", Instance: 3, Follower: 1_000})
	was := renew(third)
	renew(follower)
	for _, test := range []struct {
		follower, owner string
		fails           error
	}{{"a follower that has renewed", "zo", store.ErrMoved}, {"one that is silent", "zt", nil}} {
		_, err := s.Claim(ctx, third, was["zo"], was["zf"], 0)
		testkit.ErrorIs(t, err, test.fails, "%s", test.follower)
		if p := first(); p.Owner != test.owner {
			t.Errorf("%s: %s is the owner, want %s", test.follower, p.Owner, test.owner)
		}
		was = renew(third)
	}
}

func keys(rules []rule.Rule) string {
	var all []string
	for _, r := range rules {
		all = append(all, r.Key)
	}
	if slices.IsSorted(all) {
		return strings.Join(all, " ")
	}
	return "unsorted " + strings.Join(all, " ")
}

// savedOf returns the last written credit of a key, or nil if the key was never written.
func savedOf(s *store.Store, key string) (*table.Credit, error) {
	all, err := s.Credits(context.Background(), []string{key, key + "?"})
	c, ok := all[key]
	if len(all) > 1 || !ok {
		return nil, err
	}
	return &c, err
}
