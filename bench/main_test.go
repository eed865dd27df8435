//go:build linux

package main

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/program"
	"github.com/srtm-io/srtm/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestEachScenarioListsItsFlags(t *testing.T) {
	var all bytes.Buffer
	testkit.Must(t, start(t.Context(), []string{"--help"}, &all, &all))
	for _, s := range scenarios {
		var out bytes.Buffer
		testkit.Must(t, start(t.Context(), []string{s.name, "--help"}, &out, &out))
		if !strings.HasPrefix(out.String(), "Usage: bench "+s.name+" [flags]\n") || !strings.Contains(out.String(), "  -") {
			t.Errorf("%s --help prints\n%s", s.name, &out)
		}
		if !strings.Contains(all.String(), s.name) {
			t.Errorf("--help does not list %s:\n%s", s.name, &all)
		}
		err := start(t.Context(), []string{s.name, "--nonsense"}, &out, &out)
		if _, usage := errors.AsType[program.UsageError](err); !usage {
			t.Errorf("%s --nonsense: %v, want an error of usage", s.name, err)
		}
	}
}

func TestAWrongScenarioIsAnErrorOfUsage(t *testing.T) {
	for _, args := range [][]string{nil, {"peers"}} {
		var out bytes.Buffer
		err := start(t.Context(), args, &out, &out)
		if _, usage := errors.AsType[program.UsageError](err); !usage || out.Len() > 0 {
			t.Errorf("%q: %v", args, err)
		}
	}
}
