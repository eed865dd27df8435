package metadata

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/srtm-io/srtm/internal/testkit"
)

// large returns a state whose file is not small.
func large(topics int) (s State) {
	for i := range topics {
		s.Topics = append(s.Topics, Topic{Name: fmt.Sprintf("t%05d", i), Channels: []Channel{{Name: "a"}, {Name: "b", Created: uint64(i)}}})
	}
	return s
}

func read(t testing.TB, path string) State {
	t.Helper()
	return testkit.Result(Read(path)).Must(t)
}

// Each change once replaced the whole file.
func TestAChangeOfALargeFileWritesTheChange(t *testing.T) {
	path := filepath.Join(t.TempDir(), "metadata.json")
	const topics = 2000
	f, s := NewFile(path), large(topics)
	testkit.Must(t, f.Write(s))
	whole := f.written
	for i := range s.Topics {
		s.Topics[i].Paused = true
		appended, err := f.Append([]Change{{Topic: &s.Topics[i]}})
		if testkit.Must(t, err); !appended {
			testkit.Must(t, f.Write(s))
		}
	}
	if most := 4 * whole; f.written > most {
		t.Errorf("%d changes of %d topics write %d bytes, want at most %d", topics, topics, f.written, most)
	}
	if !reflect.DeepEqual(read(t, path), s) {
		t.Error("the file does not have the changes")
	}
	testkit.Must(t, f.Close(func() State { return s }))
	if _, err := os.Stat(path + changesSuffix); !errors.Is(err, os.ErrNotExist) || !reflect.DeepEqual(read(t, path), s) {
		t.Errorf("after Close: %v; want all topics in one file", err)
	}
}

func TestASmallFileHasNoChanges(t *testing.T) {
	f := NewFile(filepath.Join(t.TempDir(), "metadata.json"))
	for range 2 {
		if appended, err := f.Append([]Change{{Removed: "t"}}); appended || err != nil {
			t.Errorf("appended: %v, %v", appended, err)
		}
		testkit.Must(t, f.Write(large(10)))
	}
}

func TestChangesAreAsTheWholeFile(t *testing.T) {
	dir := t.TempDir()
	runs := 0
	rapid.Check(t, func(t *rapid.T) {
		runs++
		path := filepath.Join(dir, fmt.Sprint(runs))
		s := large(700)
		f := NewFile(path)
		write := func() {
			if err := f.Write(s); err != nil {
				t.Fatal(err)
			}
		}
		write()
		for range rapid.IntRange(1, 8).Draw(t, "steps") {
			name := fmt.Sprintf("t%05d", rapid.IntRange(0, 3).Draw(t, "topic")*300)
			i, found := slices.BinarySearchFunc(s.Topics, name, func(t Topic, name string) int {
				return slices.Compare([]byte(t.Name), []byte(name))
			})
			c := Change{Removed: name}
			s.Topics = slices.Clone(s.Topics)
			switch kind := rapid.IntRange(0, 3).Draw(t, "kind"); {
			case kind == 0:
				write()
				continue
			case kind == 1 && found:
				s.Topics = slices.Delete(s.Topics, i, i+1)
			case kind > 1:
				if !found {
					s.Topics = slices.Insert(s.Topics, i, Topic{Name: name})
				}
				s.Topics[i].Paused = !s.Topics[i].Paused
				c = Change{Topic: &s.Topics[i]}
			}
			if appended, err := f.Append([]Change{c}); err != nil {
				t.Fatal(err)
			} else if !appended {
				write()
			}
		}
		got, err := Read(path)
		if err != nil || !reflect.DeepEqual(got, s) {
			t.Fatalf("%d topics, %v; want %d", len(got.Topics), err, len(s.Topics))
		}
		f.end()
	})
}

func TestACrashInAChangeLosesThatChangeAlone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "metadata.json")
	f, s := NewFile(path), large(700)
	testkit.Must(t, f.Write(s))
	var sizes []int
	for _, name := range []string{"t00001", "t00002"} {
		testkit.Equal(t, testkit.Result(f.Append([]Change{{Removed: name}})).Must(t), true, "appended")
		sizes = append(sizes, int(f.appended))
	}
	f.end()
	all := testkit.Result(os.ReadFile(path + changesSuffix)).Must(t)
	for cut := 0; cut < len(all); cut += 3 {
		testkit.Must(t, os.WriteFile(path+changesSuffix, all[:cut], 0o600))
		want := 700
		if cut >= sizes[0] {
			want--
		}
		testkit.Equal(t, len(read(t, path).Topics), want, "topics after a cut at %d of %d", cut, len(all))
	}

	damaged := slices.Clone(all)
	damaged[sizes[0]-5] ^= 1
	testkit.Must(t, os.WriteFile(path+changesSuffix, damaged, 0o600))
	_, err := Read(path)
	testkit.ErrorIs(t, err, ErrDamaged, "a damaged line before the last")

	// Changes of an earlier file say nothing about the file.
	testkit.Must(t, Write(path, large(699)))
	testkit.Must(t, os.WriteFile(path+changesSuffix, all, 0o600))
	testkit.Equal(t, len(read(t, path).Topics), 699, "topics")
}
