package agent

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tokenbucket"
)

// A topic name from the control plane never names a file outside of the store's folder.
func TestTopicsAreNoPaths(t *testing.T) {
	dir := t.TempDir()
	f := testkit.Result(OpenFiles(filepath.Join(dir, "shares"))).Must(t)
	const topic = "../else"
	mine := filepath.Join(dir, "else.kept")
	testkit.Must(t, os.WriteFile(mine, []byte("mine"), 0o600))
	if f.Save(Base{Topic: topic, Epoch: 1, Share: tokenbucket.Share{Rate: 1, Burst: 1}}) == nil || f.Keep(topic, []byte("theirs")) == nil || f.Remove(topic) == nil || f.Keep(topic, nil) == nil {
		t.Error("no error")
	}
	if record := f.Kept(topic); record != nil {
		t.Errorf("%q is kept", record)
	}
	all, err := os.ReadDir(dir)
	testkit.Must(t, err)
	if text, err := os.ReadFile(mine); string(text) != "mine" || len(all) != 2 {
		t.Errorf("%q, %v; %v", text, err, all)
	}
}

func FuzzParseBase(f *testing.F) {
	f.Add([]byte(`{"version":1,"topic":"t","epoch":7,"rate_milli":5,"burst":2}`))
	f.Add([]byte(`{"version":1,"topic":"","epoch":18446744073709551615,"rate_milli":-9223372036854775808,"burst":1e9}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		b, err := parseBase(data)
		if err == nil && (b.Topic == "" || b.Epoch == 0 || b.Share.IsZero() || b.Share.Validate() != nil) {
			t.Errorf("%q is taken as %+v", data, b)
		}
		if err != nil && b != (Base{}) {
			t.Errorf("%q: %v, and %+v", data, err, b)
		}
	})
}
