package logtest_test

import (
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/commitlog/logtest"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestMemory(t *testing.T) {
	logtest.Suite(t, func(*testing.T) logtest.Subject {
		m := new(logtest.Memory)
		return logtest.Subject{Log: m, Reopen: func() commitlog.Log { return m }}
	})
}

func TestMemoryCrash(t *testing.T) {
	rng := testkit.Rand(t)
	for range 100 {
		m := new(logtest.Memory)
		for range 10 {
			if _, err := m.Append(make([]commitlog.Record, 1)); err != nil {
				t.Fatal(err)
			}
		}
		if err := m.Sync(4); err != nil {
			t.Fatal(err)
		}
		if err := m.SaveCursors([]byte("x")); err != nil {
			t.Fatal(err)
		}
		m.Crash(rng)
		if n := m.Len(); n < 4 || n > 10 {
			t.Errorf("%d records are left", n)
		}
		if next, _ := m.Append(nil); next != 10 {
			t.Errorf("next is %d", next)
		}
	}
}
