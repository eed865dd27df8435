package metadata_test

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/metadata"
)

func TestMain(m *testing.M) { testkit.Main(m) }

var sample = metadata.State{Topics: []metadata.Topic{
	{Name: "a", Contract: &metadata.Contract{RateMilli: 2500, Burst: 3, Reject: true}},
	{Name: "b", Paused: true, Channels: []metadata.Channel{{Name: "x"}, {Name: "y", Paused: true}}},
	{Name: "c", Contract: &metadata.Contract{RateMilli: 1, Burst: 1}, Logged: true},
}}

// golden is the file as this release writes the metadata. Other releases must still read the file.
const golden = `{
  "version": 1,
  "crc32c": "c1ab2de5",
  "topics": [
    {
      "name": "a",
      "contract": {
        "rate_milli": 2500,
        "burst": 3,
        "reject": true
      }
    },
    {
      "name": "b",
      "paused": true,
      "channels": [
        {
          "name": "x"
        },
        {
          "name": "y",
          "paused": true
        }
      ]
    },
    {
      "name": "c",
      "contract": {
        "rate_milli": 1,
        "burst": 1
      },
      "logged": true
    }
  ]
}
`

func TestTheFileIsAsItAlwaysWas(t *testing.T) {
	b, err := metadata.Encode(sample)
	if err != nil || string(b) != golden {
		t.Errorf("%v\n%s", err, b)
	}
	s, err := metadata.Parse([]byte(golden))
	if err != nil || !reflect.DeepEqual(s, sample) {
		t.Errorf("%+v %v", s, err)
	}
}

func TestAFileIsReplacedAsAWhole(t *testing.T) {
	path := filepath.Join(t.TempDir(), "metadata.json")
	if s, err := metadata.Read(path); err != nil || len(s.Topics) != 0 {
		t.Errorf("no file: %+v %v", s, err)
	}
	// A process that ended during a write left this file.
	testkit.Must(t, os.WriteFile(path+".new", []byte("{"), 0o600))
	for _, want := range []metadata.State{sample, {}, {Topics: sample.Topics[1:]}} {
		testkit.Must(t, metadata.Write(path, want))
		if s, err := metadata.Read(path); err != nil || len(s.Topics) != len(want.Topics) || len(want.Topics) > 0 && !reflect.DeepEqual(s, want) {
			t.Errorf("%+v %v", s, err)
		}
	}
	testkit.Must(t, os.Remove(path+".new"))
	testkit.Must(t, os.Mkdir(path+".new", 0o700))
	if err := metadata.Write(path, metadata.State{}); err == nil {
		t.Error("it was written where that is impossible")
	}
	if s, err := metadata.Read(path); err != nil || len(s.Topics) != 2 {
		t.Errorf("the failure has changed the file: %+v %v", s, err)
	}
}

func TestWhatIsDamagedIsAnError(t *testing.T) {
	dir := t.TempDir()
	for name, c := range map[string]struct {
		text string
		want error
	}{
		"empty":              {"", metadata.ErrDamaged},
		"cut":                {golden[:len(golden)/2], metadata.ErrDamaged},
		"nothing in it":      {"{}", metadata.ErrVersion},
		"edited":             {strings.Replace(golden, `"burst": 3`, `"burst": 4`, 1), metadata.ErrDamaged},
		"without its topics": {`{"version":1,"crc32c":"00000000"}`, metadata.ErrDamaged},
		"a later version":    {strings.Replace(golden, `"version": 1`, `"version": 2`, 1), metadata.ErrVersion},
		"something behind":   {golden + "{}", metadata.ErrDamaged},
	} {
		path := filepath.Join(dir, name)
		testkit.Must(t, os.WriteFile(path, []byte(c.text), 0o600))
		if s, err := metadata.Read(path); !errors.Is(err, c.want) || !strings.Contains(err.Error(), path) || len(s.Topics) > 0 {
			t.Errorf("%s: %+v %v", name, s, err)
		}
	}
	// Any changed byte is detected, except in white space.
	for i := range golden {
		for _, flip := range []byte{1, 0x20} {
			b := []byte(golden)
			b[i] ^= flip
			if s, err := metadata.Parse(b); err == nil && !reflect.DeepEqual(s, sample) {
				t.Errorf("byte %d changed to %q gives %+v", i, b[i], s)
			}
		}
	}
}

func TestWhatNoNodeHasIsRefused(t *testing.T) {
	channels := func(names ...string) metadata.State {
		s := metadata.State{Topics: []metadata.Topic{{Name: "t"}}}
		for _, n := range names {
			s.Topics[0].Channels = append(s.Topics[0].Channels, metadata.Channel{Name: n})
		}
		return s
	}
	for _, s := range []metadata.State{
		{Topics: []metadata.Topic{{Name: ""}}},
		{Topics: []metadata.Topic{{Name: "a*"}}},
		{Topics: []metadata.Topic{{Name: "a#ephemeral"}}},
		{Topics: []metadata.Topic{{Name: "b"}, {Name: "a"}}},
		{Topics: []metadata.Topic{{Name: "a"}, {Name: "a"}}},
		{Topics: []metadata.Topic{{Name: "a", Contract: &metadata.Contract{}}}},
		{Topics: []metadata.Topic{{Name: "a", Contract: &metadata.Contract{RateMilli: -1, Burst: 1}}}},
		channels("x", "x"), channels("y", "x"), channels("x#ephemeral"), channels("a b"),
	} {
		if b, err := metadata.Encode(s); err == nil {
			t.Errorf("%s", b)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(golden))
	f.Add([]byte(`{"version":1,"crc32c":"b9ea2d1e","topics":[]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := metadata.Parse(b)
		if err != nil {
			if len(s.Topics) > 0 {
				t.Errorf("%+v with %v", s, err)
			}
			return
		}
		again, err := metadata.Encode(s)
		if err != nil {
			t.Fatalf("%+v: %v", s, err)
		}
		if back, err := metadata.Parse(again); err != nil || !reflect.DeepEqual(back, s) {
			t.Errorf("%+v became %+v: %v", s, back, err)
		}
	})
}
