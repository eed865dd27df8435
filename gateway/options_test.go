package main

import (
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestConnectionsFitTheDescriptors(t *testing.T) {
	for descriptors, want := range map[int64]int{1: 1, 1024: 384, 65_536: 27_768, 1 << 20: 50_000, math.MaxInt64: 50_000} {
		if got := defaultConnections(descriptors); got != want {
			t.Errorf("%d connections of %d descriptors, want %d", got, descriptors, want)
		}
	}
}

// The URL to explain is the argument after the flags. The value of a flag does not count as the URL.
func TestExplain(t *testing.T) {
	file := testkit.File(t, "policy.toml", "[[class]]\nname = \"a\"\n")
	for _, args := range [][]string{
		{"--tenant", "acme", "/report/7"},
		{"--url=/report/7", "--header", "Accept: text/html"},
		{"report"},
	} {
		if err := command(t.Context(), append([]string{"explain", "--policy", file}, args...)); err != nil {
			t.Errorf("%q: %v", args, err)
		}
	}
	for _, args := range [][]string{{}, {"/a", "/b"}} {
		if err := command(t.Context(), append([]string{"explain", "--policy", file}, args...)); err == nil {
			t.Errorf("%q: explained", args)
		}
	}
}

// A file may be a valid policy at any moment while it is being written: a policy of no servers, or of
// the first servers.
func TestHalfAPolicy(t *testing.T) {
	const before = "[[server]]\nurl = \"http://a\"\n"
	const after = before + "[[server]]\nurl = \"http://b\"\n[[server]]\nurl = \"http://c\"\n"
	o := options{policyFile: filepath.Join(t.TempDir(), "policy.toml")}
	write := func(text string) { testkit.Must(t, os.WriteFile(o.policyFile, []byte(text), 0o600)) }
	write(before)
	testkit.Must(t, o.validatePolicy())
	for i, look := range []struct {
		text    string
		servers int // of the accepted policy; -1: nothing is accepted
	}{
		{before, -1}, {"", -1}, {after[:60], -1}, {after, -1}, {after, 3}, {after, -1}, {before, -1}, {after, -1}, {after, -1}, {"", -1}, {"", 0},
	} {
		write(look.text)
		got := -1
		p := testkit.Result(o.readPolicy(false)).Must(t)
		if p != nil {
			got = len(p.Servers)
		}
		if got != look.servers {
			t.Errorf("look %d: took %d servers, want %d", i, got, look.servers)
		}
	}
}
