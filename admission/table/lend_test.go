package table_test

import (
	"testing"
	"time"

	"github.com/srtm-io/srtm/admission/rule"
	"github.com/srtm-io/srtm/admission/table"
	"github.com/srtm-io/srtm/internal/mono"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

func TestLend(t *testing.T) {
	s, key, at := table.New(1), []byte("k"), mono.Time(time.Hour)
	contract := tokenbucket.Share{Rate: 1000, Burst: 5}
	r := rule.Rule{Key: "k", Share: contract, Leased: true}
	if _, _, ok := s.Lend(key, at); ok {
		t.Error("a key that is not there was lent")
	}
	s.Learn("k", &r, 3*tokenbucket.Token, at)
	if got, credits, ok := s.Lend(key, at); got != contract || credits != 3*tokenbucket.Token || !ok {
		t.Errorf("lent %+v with %d, %v", got, credits, ok)
	}
	if v := s.Ask(key, 1, at, false); v.Admit || !v.Lent || !v.Leased {
		t.Errorf("%+v of a key that is lent", v)
	}
	// Nor does it earn anything meanwhile, for those who ask or for the store.
	if v := s.Ask(key, 1, at.Add(time.Minute), false); v.Admit || !v.Denied || !v.Lent {
		t.Errorf("%+v of a key that is lent for a minute", v)
	}
	if credits, _ := s.Changed(table.Saver, nil, nil, 0, 1, table.Now{Mono: at.Add(time.Minute)}); len(credits) != 1 || credits[0].Credits != 0 {
		t.Errorf("a key that is lent holds %+v", credits)
	}
	if later := at.Add(time.Hour); s.Learn("other", &rule.Rule{}, 0, later) {
		t.Error("a key that is lent was evicted")
	}
	r.Share.Burst = 7
	s.Follow("k", &r, at)
	testkit.Equal(t, s.Contract("k"), r.Share, "contract after an edit")
	s.Return("k", 2*tokenbucket.Token, at.Add(time.Minute)) // what it would have earned meanwhile is not there
	if v := s.Ask(key, 2, at.Add(time.Minute), false); !v.Admit || v.Lent || v.Left != 0 {
		t.Errorf("%+v after its return", v)
	}
	r.Leased = false
	if s.Follow("k", &r, at); !s.Contract("k").IsZero() || !s.Contract("none").IsZero() {
		t.Error("a key that is not leased is to be divided")
	}

	// One whose credits only begin later holds none before, lent or not.
	s = table.New(1)
	r.Leased = true
	s.Learn("k", &r, 0, at.Add(time.Minute))
	if _, credits, _ := s.Lend(key, at); credits != 0 {
		t.Errorf("lent with %d credits", credits)
	}
	s.Return("k", 0, at.Add(time.Second))
	if v := s.Ask(key, 1, at.Add(time.Minute), true); v.Admit {
		t.Errorf("%+v before it earned anything", v)
	}
	r.Share = tokenbucket.Share{Rate: 1e9, Burst: 100}
	s.Follow("k", &r, at.Add(time.Second)) // an edit does not have it begin earlier
	for after, admit := range map[time.Duration]bool{59 * time.Second: false, 61 * time.Second: true} {
		if v := s.Ask(key, 1, at.Add(after), true); v.Admit != admit {
			t.Errorf("%+v after %v", v, after)
		}
	}
}
