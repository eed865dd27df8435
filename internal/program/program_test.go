package program

import (
	"bytes"
	"errors"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// An error may contain text from a server. A terminal must not obey control characters in the text.
func TestErrorsAreNoOrders(t *testing.T) {
	var stderr bytes.Buffer
	PrintError(&stderr, "x", errors.Join(errors.New("a\x1b]0;owned\a\u009b2J\rb"), errors.New("\x9bc")))
	testkit.Equal(t, stderr.String(), "x: a\\u001b]0;owned\\u0007\\u009b2J\\u000db\nx: \\u009bc\n")
}

func TestCommit(t *testing.T) {
	for want, settings := range map[string][]debug.BuildSetting{
		"unknown commit":       nil,
		"0123456789ab":         {{Key: "vcs.revision", Value: "0123456789abcdef0123"}, {Key: "vcs.modified", Value: "false"}},
		"0123456789ab+changes": {{Key: "vcs.modified", Value: "true"}, {Key: "vcs.revision", Value: "0123456789abcdef0123"}},
		"abc":                  {{Key: "vcs.revision", Value: "abc"}},
	} {
		testkit.Equal(t, commit(&debug.BuildInfo{Settings: settings}), want, "%v", settings)
	}
	testkit.Equal(t, commit(nil), "unknown commit", "no build information")
	if got := Version(); !strings.HasPrefix(got, "SRTM "+Release+" (") || !strings.HasSuffix(got, ")") {
		t.Errorf("version %q, want SRTM %s (commit)", got, Release)
	}
}
