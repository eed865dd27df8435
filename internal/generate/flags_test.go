package main

import (
	"bytes"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

func TestParse(t *testing.T) {
	groups := testkit.Result(parse(`thing does things.

Usage: thing [flags]

Examples:
  thing --size=1

Addresses:
  --http-address host:port      host:port for HTTP (default
                                x:1)
  --silent                      say nothing
  --a-limit-of-one topic:rate[:delay|reject]
                                limit of a topic; * stands for
                                all topics

Storage:
  --data-path folder            folder
`)).Must(t)
	var text bytes.Buffer
	write(&text, "thing", groups)
	testkit.Equal(t, text.String(), "\n## thing\n\n**Addresses**\n\n| flag | |\n|---|---|\n"+
		"| `--http-address host:port` | host:port for HTTP (default x:1) |\n"+
		"| `--silent` | say nothing |\n"+
		"| `--a-limit-of-one topic:rate[:delay\\|reject]` | limit of a topic; \\* stands for all topics |\n"+
		"\n**Storage**\n\n| flag | |\n|---|---|\n"+
		"| `--data-path folder` | folder |\n", "page")
}

func TestParseRefusesOtherTexts(t *testing.T) {
	for _, help := range []string{"", "no flags\n", "Addresses:\n  neither a flag nor a text\n", "Addresses:\n                                a text before all flags\n"} {
		if groups, err := parse(help); err == nil {
			t.Errorf("%q is read as %v", help, groups)
		}
	}
}
