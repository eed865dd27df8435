package server_test

import (
	"database/sql"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/server"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

// backup copies a store. restore puts the store back to the copy while servers run.
func (b *bench) backup() (restore func()) {
	b.t.Helper()
	other := testkit.Result(sql.Open("sqlite", "file:"+b.path+"?_pragma=busy_timeout(5000)&_txlock=immediate")).Must(b.t)
	b.t.Cleanup(func() { other.Close() })
	other.SetMaxOpenConns(1) // a single connection, with the copy attached
	copied := filepath.Join(b.t.TempDir(), "copy.db")
	do := func(statement string, args ...any) {
		b.t.Helper()
		testkit.Result(other.Exec(statement, args...)).Must(b.t)
	}
	do(`VACUUM INTO ?`, copied)
	return func() {
		b.t.Helper()
		do(`ATTACH ? AS copy`, copied)
		back := `BEGIN IMMEDIATE;`
		for _, of := range []string{"admission", "rules", "credits", "servers", "partitions"} {
			back += fmt.Sprintf("DELETE FROM %s; INSERT INTO %[1]s SELECT * FROM copy.%[1]s;", of)
		}
		do(back + `COMMIT`)
	}
}

// If the store is put back to an older copy, a server follows the restored rules. The server also
// follows new edits that repeat edit numbers it has seen.
func TestTheStoreIsPutBack(t *testing.T) {
	for _, test := range []struct {
		name  string
		joins bool // the server joins after the copy was made
		edits int  // after the restore; there were 4 before
	}{{"no edit since", false, 0}, {"few edits since", false, 2}, {"many edits since", false, 8}, {"to before the server began", true, 2}} {
		t.Run(test.name, func(t *testing.T) {
			b := newBench(t, rule.Rule{Key: "own", Share: share(1, 5)}, rule.Rule{Key: "gone", Share: share(1, 5)}, rule.Rule{Key: "d/*", Share: share(1, 5)})
			link := &cable{Store: b.store}
			b.cfg.Store, b.cfg.Renew, b.cfg.Poll = server.NewStore(link), 20*time.Millisecond, 20*time.Millisecond
			var s *server.Server
			var restore func()
			if test.joins {
				restore = b.backup()
			}
			s, _ = b.start()
			c := b.client(s)
			holds := func(want map[string]int64) {
				t.Helper()
				testkit.WaitFor(t, fmt.Sprintf("keys hold %v", want), func() bool {
					b.clock.pass(time.Hour) // all keys are full
					for key, left := range want {
						if c.Peek(t.Context(), key, 0).Left != left {
							return false
						}
					}
					return true
				})
			}
			holds(map[string]int64{"own": 5, "gone": 5, "d/1": 5, "new": 0})
			if !test.joins {
				restore = b.backup()
			}
			link.renewed(t)
			b.set(rule.Rule{Key: "own", Share: share(1, 50)}, rule.Rule{Key: "new", Share: share(1, 50)}, rule.Rule{Key: "d/*", Share: share(1, 50)})
			testkit.Result(b.store.DeleteRule(t.Context(), "gone")).Must(t)
			holds(map[string]int64{"own": 50, "gone": 0, "d/1": 50, "new": 50})
			restore()
			want := map[string]int64{"own": 5, "gone": 5, "d/1": 5, "new": 0}
			for i := range test.edits {
				key := []string{"d/*", "gone"}[i%2]
				b.set(rule.Rule{Key: key, Share: share(1, 7)})
				want[map[string]string{"d/*": "d/1", "gone": "gone"}[key]] = 7
			}
			holds(want)
			b.set(rule.Rule{Key: "own", Share: share(1, 9)})
			want["own"] = 9
			holds(want)
		})
	}
}

// A server also notices a copy that is younger than the last renewal, at the first write after the
// restore, if this write is the last. A strict key is not admitted again what was admitted since the
// copy.
func TestTheStoreIsPutBackToAYoungCopy(t *testing.T) {
	for _, writes := range []bool{true, false} {
		b := newBench(t, rule.Rule{Key: "key", Share: tokenbucket.Share{Rate: 1, Burst: 10}, Strict: true}, rule.Rule{Key: "other", Share: share(1, 5)})
		b.cfg.Checkpoint = 20 * time.Millisecond
		s, stop := b.start()
		c := b.client(s)
		holds := func(want tokenbucket.Tokens) {
			t.Helper()
			testkit.WaitFor(t, "the credits are saved", func() bool {
				return testkit.Result(b.store.Credits(t.Context(), []string{"key"})).Must(t)["key"].Credits == want*tokenbucket.Token
			})
		}
		sure(t, c, "key", 3)
		holds(7)
		restore := b.backup()
		sure(t, c, "key", 4)
		holds(3)
		restore()
		if writes {
			sure(t, c, "other", 1)
			testkit.WaitFor(t, "the server begins anew", func() bool {
				all, _, err := b.store.Owners(t.Context())
				return err == nil && all[0].Epoch == 2
			})
		}
		stop()
		s, _ = b.start()
		b.clock.pass(10 * time.Second)
		testkit.Equal(t, sure(t, b.client(s), "key", 1).Admit, false, "writes %v: admitted more than the capacity", writes)
	}
}

// A copy from before an edit that a server follows lacks the edit. The server notices this, too.
func TestAnEditThatIsFollowedIsABeat(t *testing.T) {
	b := newBench(t)
	link := &cable{Store: b.store}
	b.cfg.Store, b.cfg.Poll = server.NewStore(link), 20*time.Millisecond
	b.start()
	b.set(rule.Rule{Key: "key", Share: share(1, 5)})
	testkit.WaitFor(t, "a renewal", func() bool { return link.renewals.Load() > 0 })
}
