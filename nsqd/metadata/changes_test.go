package metadata_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsqd/metadata"
)

// reporter is a test of any kind.
type reporter interface {
	Helper()
	Fatalf(format string, args ...any)
	Errorf(format string, args ...any)
	Fatal(args ...any)
	Error(args ...any)
}

func open(t reporter, path string) *metadata.File {
	t.Helper()
	file, _, err := metadata.Open(path)
	testkit.Must(t, err)
	file.AppendFrom(1)
	return file
}

func many() metadata.State {
	var s metadata.State
	for i := range 10 {
		s.Topics = append(s.Topics, metadata.Topic{Name: fmt.Sprintf("t%04d", i), Channels: []metadata.Channel{{Name: "a"}, {Name: "b"}, {Name: "c"}}})
	}
	return s
}

// with returns s with changes.
func with(s metadata.State, changes ...metadata.Change) metadata.State {
	s.Topics = slices.Clone(s.Topics)
	for _, c := range changes {
		s.Topics = slices.DeleteFunc(s.Topics, func(t metadata.Topic) bool { return t.Name == c.Name })
		if c.Topic != nil {
			s.Topics = append(s.Topics, *c.Topic)
		}
	}
	slices.SortFunc(s.Topics, func(a, b metadata.Topic) int { return strings.Compare(a.Name, b.Name) })
	return s
}

func same(t reporter, got, want metadata.State) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		t.Fatalf("%d topics, want %d: %+v", len(got.Topics), len(want.Topics), got.Topics[max(0, len(got.Topics)-3):])
	}
}

func appended(file *metadata.File, changes ...metadata.Change) bool {
	return file.Append(len(changes), slices.Values(changes))
}

func created(name string) metadata.Change {
	return metadata.Change{Name: name, Topic: &metadata.Topic{Name: name, Paused: true}}
}

func content(t reporter, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	testkit.Must(t, err)
	return b
}

// What is stored for one of many topics does not grow with their number.
func TestAChangeOfOneTopicDoesNotWriteAll(t *testing.T) {
	path := filepath.Join(t.TempDir(), "metadata.json")
	file := open(t, path)
	defer file.Close()
	if appended(file, created("x")) {
		t.Error("a file that is not there has taken a change")
	}
	testkit.Must(t, file.Write(many()))
	file.AppendFrom(64 << 10)
	if appended(file, created("x")) {
		t.Error("a small file has taken a change")
	}
	file.AppendFrom(1)
	want := many()
	testkit.Must(t, file.Write(want))
	whole := content(t, path)
	for i := range 10 {
		c := created(fmt.Sprint("u", i))
		if i%2 == 1 {
			c = metadata.Change{Name: want.Topics[i].Name}
		}
		if want = with(want, c); !appended(file, c) {
			t.Fatal("change refused", i)
		}
		same(t, testkit.Result(metadata.Read(path)).Must(t), want)
	}
	testkit.Equal(t, bytes.Equal(whole, content(t, path)), true)
	if n := len(content(t, path+".changes")); n > 11*100 {
		t.Errorf("10 changes are %d bytes", n)
	}
	testkit.Must(t, file.Write(want))
	same(t, testkit.Result(metadata.Read(path)).Must(t), want)
	if _, err := os.Stat(path + ".changes"); !errors.Is(err, os.ErrNotExist) {
		t.Error("changes are there that the file has", err)
	}
}

// The file of changes is never larger than the file by more than one change.
func TestChangesEndInAWholeFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "metadata.json")
	file := open(t, path)
	defer file.Close()
	testkit.Must(t, file.Write(many()))
	changes := 0
	for appended(file, created("u")) {
		changes++
	}
	if whole, n := len(content(t, path)), len(content(t, path+".changes")); n < whole || n > whole+100 {
		t.Errorf("%d changes of %d bytes beside a file of %d", changes, n, whole)
	}
}

// A file of changes that the crash of a machine has cut, or left with zeros, has every change that
// was stored before. Damage anywhere else is an error.
func TestChangesThatWereCut(t *testing.T) {
	path := filepath.Join(t.TempDir(), "metadata.json")
	file := open(t, path)
	testkit.Must(t, file.Write(many()))
	states := []metadata.State{many()}
	ends := []int{0}
	for i := range 3 {
		c := created(fmt.Sprint("u", i))
		testkit.Equal(t, appended(file, c), true)
		states = append(states, with(states[i], c))
		ends = append(ends, len(content(t, path+".changes")))
	}
	file.Close()
	whole := content(t, path+".changes")
	check := func(b []byte, kept int, what string) {
		t.Helper()
		testkit.Must(t, os.WriteFile(path+".changes", b, 0o600))
		s, err := metadata.Read(path)
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		for i, end := range ends {
			if end <= kept && (i+1 == len(ends) || ends[i+1] > kept) && !reflect.DeepEqual(s, states[i]) {
				t.Fatalf("%s: not the state after %d changes", what, i)
			}
		}
	}
	for n := range whole {
		check(whole[:n], n, fmt.Sprint("cut to ", n))
		zeros := slices.Concat(whole[:n], make([]byte, len(whole)-n))
		check(zeros, n, fmt.Sprint("zeros from ", n))
		flipped := slices.Clone(whole)
		flipped[n] ^= 0x04
		testkit.Must(t, os.WriteFile(path+".changes", flipped, 0o600))
		s, err := metadata.Read(path)
		if n == len(whole)-1 { // the last end of a line is gone: the line was not written wholly
			continue
		}
		if !errors.Is(err, metadata.ErrDamaged) || len(s.Topics) > 0 || !strings.Contains(err.Error(), path+".changes") {
			t.Fatalf("byte %d flipped: %d topics, %v", n, len(s.Topics), err)
		}
	}
}

// Changes of an earlier generation are in the file already; of a later one the file is missing.
func TestChangesOfAnotherGeneration(t *testing.T) {
	path := filepath.Join(t.TempDir(), "metadata.json")
	file := open(t, path)
	testkit.Must(t, file.Write(many()))
	earlier := content(t, path)
	testkit.Equal(t, appended(file, created("u")), true)
	changes := content(t, path+".changes")
	testkit.Must(t, file.Write(many()))
	testkit.Equal(t, appended(file, created("v")), true)
	later := content(t, path+".changes")
	file.Close()
	testkit.Must(t, os.WriteFile(path+".changes", changes, 0o600))
	same(t, testkit.Result(metadata.Read(path)).Must(t), many())
	testkit.Must(t, os.WriteFile(path+".changes", later, 0o600))
	testkit.Must(t, os.WriteFile(path, earlier, 0o600))
	if s, err := metadata.Read(path); !errors.Is(err, metadata.ErrDamaged) {
		t.Errorf("%d topics, %v", len(s.Topics), err)
	}
	testkit.Must(t, os.Remove(path))
	if s, err := metadata.Read(path); !errors.Is(err, metadata.ErrDamaged) {
		t.Errorf("%d topics, %v", len(s.Topics), err)
	}
}

// Whatever is written, appended and read again, and whichever of it fails: the files say what the
// last successful call has stored.
func TestChangesAreAsAWholeFile(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		dir, err := os.MkdirTemp("", "metadata")
		testkit.Must(t, err)
		defer os.RemoveAll(dir)
		path := filepath.Join(dir, "metadata.json")
		file := open(t, path)
		defer func() { file.Close() }()
		is := many()
		testkit.Must(t, file.Write(is))
		for range rapid.IntRange(1, 20).Draw(t, "steps") {
			c := metadata.Change{Name: fmt.Sprintf("t%04d", rapid.IntRange(0, 5).Draw(t, "topic"))}
			if rapid.Bool().Draw(t, "created") {
				c.Topic = &metadata.Topic{Name: c.Name, Paused: rapid.Bool().Draw(t, "paused")}
			}
			next := with(is, c)
			switch rapid.SampledFrom([]string{"append", "append", "write", "open", "full"}).Draw(t, "step") {
			case "append":
				if !appended(file, c) {
					testkit.Must(t, file.Write(next))
				}
				is = next
			case "write":
				testkit.Must(t, file.Write(next))
				is = next
			case "open":
				file.Close()
				file = open(t, path)
			case "full": // neither can be stored
				blocked := path + ".new"
				testkit.Must(t, os.RemoveAll(blocked))
				testkit.Must(t, os.Mkdir(blocked, 0o700))
				if file.Write(next) == nil || appended(file, c) {
					t.Fatal("stored where that is impossible")
				}
				testkit.Must(t, os.Remove(blocked))
			}
			same(t, testkit.Result(metadata.Read(path)).Must(t), is)
		}
	})
}

func FuzzChanges(f *testing.F) {
	path := filepath.Join(f.TempDir(), "metadata.json")
	file := open(f, path)
	testkit.Must(f, file.Write(many()))
	testkit.Equal(f, appended(file, created("u"), metadata.Change{Name: "t0001"}), true)
	file.Close()
	f.Add(content(f, path+".changes"))
	f.Fuzz(func(t *testing.T, b []byte) {
		testkit.Must(t, os.WriteFile(path+".changes", b, 0o600))
		if s, err := metadata.Read(path); (err == nil) == (len(s.Topics) == 0) {
			t.Errorf("%d topics, %v", len(s.Topics), err)
		}
	})
}
