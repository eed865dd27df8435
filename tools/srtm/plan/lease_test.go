package plan_test

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/lifecycle"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/tools/srtm/plan"
)

func TestLease(t *testing.T) {
	run := func(args ...string) (string, error) {
		var w bytes.Buffer
		cmd := plan.LeaseCommand()
		cmd.SetArgs(args)
		cmd.SetOut(&w)
		cmd.SetErr(&w)
		err := cmd.Execute()
		return w.String(), err
	}
	out, err := run("--refill=100", "--capacity=20", "--rate=80", "--holders=20")
	testkit.Must(t, err)
	testkit.Golden(t, "testdata/lease.table", []byte(out))
	for _, bad := range []string{"--refill=0", "--refill=NaN", "--capacity=0.5", "--rate=0", "--rate=100", "--rate=NaN", "--holders=0", "--holders=21"} {
		out, err := run("--refill=100", "--capacity=20", "--rate=80", bad)
		if name, _, _ := strings.Cut(bad, "="); !errors.As(err, &lifecycle.UsageError{}) || !strings.Contains(err.Error(), name) || out != "" {
			t.Errorf("%s: %v, %q", bad, err, out)
		}
	}
}
