package metadata_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/nsqd/metadata"
)

func TestDataOfNSQ(t *testing.T) {
	const topics = `{"topics":[{"name":"t","paused":false,"channels":[{"name":"c","paused":false}]},{"name":"u","paused":true,"channels":[]}],"version":"1.3.0"}`
	queue := map[string]string{"t.diskqueue.meta.dat": "0\n0,0\n0,0\n", "t:c.diskqueue.meta.dat": "2\n0,0\n0,92\n"}
	with := func(more map[string]string) map[string]string {
		for name, text := range queue {
			more[name] = text
		}
		return more
	}
	for name, c := range map[string]struct {
		files map[string]string
		want  string // "": it may be used
	}{
		"an empty folder":               {nil, ""},
		"ours":                          {map[string]string{"metadata.json": "{}"}, ""},
		"nothing but the file":          {map[string]string{"nsqd.dat": `{"topics":null,"version":"1.3.0"}`}, ""},
		"no topic":                      {map[string]string{"nsqd.dat": `{"topics":[],"version":"1.3.0"}`}, ""},
		"topics without messages":       {with(map[string]string{"nsqd.dat": topics}), "nsqd.dat names topics (2)"},
		"topics, and ours":              {with(map[string]string{"nsqd.dat": topics, "metadata.json": "{}"}), ""},
		"a file that is none":           {map[string]string{"nsqd.dat": "{"}, "nsqd.dat, which cannot be read"},
		"messages of a channel":         {with(map[string]string{"nsqd.dat": topics, "t:c.diskqueue.000000.dat": "m"}), `messages in 1 of its files, such as "t:c.diskqueue.000000.dat"`},
		"messages of topics, and ours":  {map[string]string{"metadata.json": "{}", "t.diskqueue.000017.dat": "m", "a.b.diskqueue.1000000.dat": "m"}, "messages in 2 of its files"},
		"messages without the file":     {map[string]string{"t.diskqueue.000000.dat": "m"}, "messages in 1 of its files"},
		"a file of messages, but empty": {map[string]string{"t.diskqueue.000000.dat": ""}, ""},
		"a file that was set aside":     {map[string]string{"t.diskqueue.000000.dat.bad": "m", "nsqd.dat.1234.tmp": topics}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for file, text := range c.files {
				if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			err := metadata.Foreign(dir, filepath.Join(dir, "metadata.json"))
			if c.want == "" && err != nil || c.want != "" && (!errors.Is(err, metadata.ErrForeign) || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
	if err := metadata.Foreign(filepath.Join(t.TempDir(), "none"), ""); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a folder that is not there: %v", err)
	}
}
