package conformance

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/srtm-io/srtm/internal/testkit"
)

// TestUpstreamConforms runs all cases against NSQ's own nsqd. A case that upstream fails asserts
// behaviour that NSQ does not have, so the case proves nothing about compatibility.
func TestUpstreamConforms(t *testing.T) {
	if !under.ours {
		t.Skip("the nsqd under test was chosen by the environment")
	}
	if filtered() {
		t.Skip("only a part of the cases was requested")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, testkit.Result(os.Executable()).Must(t), "-test.timeout=9m")
	cmd.Env = append(os.Environ(), envBinary+"="+testkit.Upstream(t, "nsqd"))
	cmd.WaitDelay = 10 * time.Second
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		t.Errorf("NSQ's nsqd does not conform: %v\n%s", err, out.Bytes())
	}
}
