package table_test

import (
	"maps"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/table"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Messages arrive in any order and any number of times. The replica keeps the last message of the
// highest epoch of each key, until the key is reported as saved.
func TestReplica(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := table.Replica{}
		want := map[string]table.Sent{}
		saved := time.Duration(-1)
		for range rapid.IntRange(0, 60).Draw(t, "steps") {
			if rapid.IntRange(0, 4).Draw(t, "what") == 0 {
				saved = max(saved, time.Duration(rapid.IntRange(0, 20).Draw(t, "saved")))
				r.Saved(saved)
				continue
			}
			s := table.Sent{Epoch: uint32(rapid.IntRange(1, 3).Draw(t, "epoch")), Credit: table.Credit{
				Key: rapid.SampledFrom([]string{"a", "b"}).Draw(t, "key"), At: time.Duration(rapid.IntRange(0, 20).Draw(t, "at")), Credits: tokenbucket.Tokens(rapid.IntRange(0, 2).Draw(t, "credits")),
			}}
			r.Put(s)
			is, ok := want[s.Key]
			if !ok || s.Epoch > is.Epoch || s.Epoch == is.Epoch && (s.At > is.At || s.At == is.At && s.Credits < is.Credits) {
				want[s.Key] = s
			}
		}
		has := maps.Clone(r)
		maps.DeleteFunc(want, func(key string, s table.Sent) bool { _, ok := has[key]; return !ok && s.At <= saved })
		maps.DeleteFunc(has, func(key string, s table.Sent) bool { _, ok := want[key]; return !ok && s.At <= saved })
		for key, s := range want {
			if is := has[key]; is != s && s.At > saved {
				t.Fatalf("%+v, want %+v", is, s)
			}
		}
	})
}

// The saved mark grows with each checkpoint, so the replica forgets everything that was sent before.
func TestReplicaForgets(t *testing.T) {
	r := table.Replica{}
	for i := range 10 {
		for range 1000 {
			r.Put(table.Sent{Epoch: 1, Credit: table.Credit{Key: string(rune('a' + i)), At: time.Duration(i)}})
		}
		r.Saved(time.Duration(i))
		if len(r) > 0 {
			t.Fatalf("%d are kept of which %d are saved", len(r), i+1)
		}
	}
}

// A key that moves to a host whose clock is ahead by S has refill x S more there, at most its
// capacity. On a host whose clock is behind, the key has the same credits or fewer.
func TestClocksOfHostsDiffer(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := rule.Rule{Share: tokenbucket.Share{Rate: tokenbucket.Rate(rapid.Int64Range(1, 1e9).Draw(t, "milli")), Burst: rapid.Int64Range(1, 1e9).Draw(t, "capacity")}}
		c := table.Credit{Credits: tokenbucket.Tokens(rapid.Int64Range(0, r.Share.Burst*1000).Draw(t, "held")), At: time.Hour}
		then := time.Hour + time.Duration(rapid.Int64Range(0, int64(time.Hour)).Draw(t, "age"))
		skew := time.Duration(rapid.Int64Range(-int64(time.Hour), int64(time.Hour)).Draw(t, "skew"))
		exact := table.Held(&c, &r, table.Now{Wall: then})
		is := table.Held(&c, &r, table.Now{Wall: then + skew})
		most := float64(exact) + float64(r.Share.Rate)*max(0, skew.Seconds()) + 1
		if float64(is) > most || is > tokenbucket.Tokens(r.Share.Burst)*tokenbucket.Token {
			t.Fatalf("%v holds %d, %v ahead %d", r.Share, exact, skew, is)
		}
	})
}
