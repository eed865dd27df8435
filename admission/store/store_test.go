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
	"github.com/srtm-io/srtm/tokenbucket"
)

func TestSQLite(t *testing.T) {
	// A name that an URL would read otherwise.
	suite(t, filepath.Join(t.TempDir(), "a b?#%20.db"))
}

func suite(t *testing.T, database string) {
	ctx := context.Background()
	s, err := store.Open(ctx, database)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { s.Close() }()
	rules := []rule.Rule{
		{Key: "user/1", Share: tokenbucket.Share{Rate: 100_000, Burst: 10}},
		{Key: "user/2", Share: tokenbucket.Share{Rate: 1e12, Burst: 1e9}, Mode: rule.Lease, Strict: true, Shadow: true, FailOpen: true},
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
		if got, err := s.Rule(ctx, rules[i].Key); err != nil || got != rules[i] {
			t.Errorf("%+v, %v, want %+v", got, err, rules[i])
		}
	}
	// All or none.
	if _, err := s.SetRules(ctx, []rule.Rule{{Key: "fine"}, {Key: "k", Share: tokenbucket.Share{Burst: 1}}}); err == nil {
		t.Error("a rule that is none was taken")
	}
	if _, err := s.Rule(ctx, "fine"); !errors.Is(err, store.ErrNoRule) {
		t.Errorf("half of what was refused was taken: %v", err)
	}

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

	// Edits are seen once each, in order, deletions too.
	now := time.UnixMilli(1_700_000_000_000)
	if _, err := s.DeleteRule(ctx, "user/1", now); err != nil {
		t.Fatal(err)
	}
	if _, err := s.DeleteRule(ctx, "user/1", now); !errors.Is(err, store.ErrNoRule) {
		t.Errorf("deleted twice: %v", err)
	}
	if last, err := s.LastChange(ctx); err != nil || last != 6 {
		t.Errorf("last change %d, %v", last, err)
	}
	rules[4].Shadow = true
	if _, err := s.SetRules(ctx, rules[4:]); err != nil {
		t.Fatal(err)
	}
	changes, err := s.Changes(ctx, 5, 10)
	if err != nil || len(changes) != 2 || !changes[0].Deleted || changes[0].Rule.Key != "user/1" || changes[0].Rule.Change != 6 ||
		changes[1].Deleted || changes[1].Rule.Key != "deny" || !changes[1].Rule.Shadow || changes[1].Rule.Change != 7 {
		t.Errorf("%+v, %v", changes, err)
	}
	if _, err := s.Rule(ctx, "user/1"); !errors.Is(err, store.ErrNoRule) {
		t.Errorf("deleted: %v", err)
	}
	if _, err := s.SetRules(ctx, rules[:1]); err != nil { // and it may come again
		t.Fatal(err)
	}
	if _, err := s.Rule(ctx, "user/1"); err != nil {
		t.Error(err)
	}
	// A deletion is forgotten after a while.
	for i, key := range []string{"user/1", "user/2"} {
		if _, err := s.DeleteRule(ctx, key, now.Add(time.Duration(2*i)*store.Remembered)); err != nil {
			t.Fatal(err)
		}
	}
	changes, err = s.Changes(ctx, 7, 10)
	if err != nil || len(changes) != 1 || changes[0].Rule.Key != "user/2" {
		t.Errorf("%+v, %v", changes, err)
	}

	// Credits, more than one statement writes, and again.
	var credits []table.Credit
	for i := range 1201 {
		credits = append(credits, table.Credit{Key: fmt.Sprint("k", i), Credits: tokenbucket.Tokens(i), At: time.Duration(i) * time.Millisecond})
	}
	for range 2 {
		if err := s.SaveCredits(ctx, credits); err != nil {
			t.Fatal(err)
		}
		credits[1200].Credits = 7
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if s, err = store.Open(ctx, database); err != nil { // it is all there the next time
		t.Fatal(err)
	}
	if c, err := s.Credit(ctx, "k1200"); err != nil || !reflect.DeepEqual(*c, credits[1200]) {
		t.Errorf("%+v, %v", c, err)
	}
	if c, err := s.Credit(ctx, "never written"); err != nil || c != nil {
		t.Errorf("%+v, %v", c, err)
	}
	if last, err := s.LastChange(ctx); err != nil || last != 10 {
		t.Errorf("last change %d, %v", last, err)
	}
}

func TestBeginAndEnd(t *testing.T) {
	beginAndEnd(t, filepath.Join(t.TempDir(), "admission.db"))
}

func beginAndEnd(t *testing.T, database string) {
	ctx := context.Background()
	s, err := store.Open(ctx, database)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	at := func(hour int) time.Time {
		return time.UnixMilli(1_700_000_000_000).Add(time.Duration(hour) * time.Hour)
	}
	begin := func(hour int, want time.Time) {
		t.Helper()
		if unknown, err := s.Begin(ctx, at(hour)); err != nil || !unknown.Equal(want) {
			t.Errorf("begun at %d: %v, %v, want %v", hour, unknown, err, want)
		}
	}
	begin(0, time.Time{})
	if err := s.End(ctx); err != nil {
		t.Fatal(err)
	}
	begin(1, time.Time{})
	begin(2, at(2)) // the one before was killed
	if err := s.End(ctx); err != nil {
		t.Fatal(err)
	}
	begin(3, at(2)) // what it had lost stays lost
	begin(4, at(4))
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
