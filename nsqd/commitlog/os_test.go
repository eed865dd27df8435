package commitlog

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
)

// The tests in this file use the operating system's disk and child processes of this test binary. childEnv gives a child
// its role.
const childEnv = "SRTM_COMMITLOG_CHILD"

// child is the main function of a child process. role is a name and arguments, separated by spaces.
func child(role string) int {
	args := strings.Fields(role)
	var err error
	switch args[0] {
	case "holder":
		err = holder(args[1])
	case "writer":
		err = writer(args[1], args[2])
	case "filler":
		err = filler(args[1])
	default:
		err = errors.New("no such role")
	}
	if err != nil {
		fmt.Printf("%s: %v\n", args[0], err)
		return 1
	}
	return 0
}

// startChild starts a child. The test kills the child in its cleanup at the latest.
func startChild(t *testing.T, cmd *exec.Cmd, role string) *bufio.Reader {
	t.Helper()
	cmd.Env = append(os.Environ(), childEnv+"="+role)
	cmd.Stderr = os.Stderr
	out := testkit.Result(cmd.StdoutPipe()).Must(t)
	testkit.Must(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // the child has ended, in most tests
		_ = cmd.Wait()
	})
	return bufio.NewReader(out)
}

func self(t *testing.T) *exec.Cmd {
	t.Helper()
	path := testkit.Result(os.Executable()).Must(t)
	return exec.Command(path)
}

// holder opens a folder and keeps the folder open until the process is killed.
func holder(path string) error {
	dir, err := OpenDir(path, OS())
	if err != nil {
		return err
	}
	defer dir.Close() // not before: the garbage collector closes a folder without references
	fmt.Println("holding")
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

func TestFolderBelongsToOneProcess(t *testing.T) {
	path := t.TempDir() + "/made/on/the/way"
	cmd := self(t)
	stdin, err := cmd.StdinPipe()
	testkit.Must(t, err)
	out := startChild(t, cmd, "holder "+path)
	if line, err := out.ReadString('\n'); line != "holding\n" {
		t.Fatalf("%q, %v", line, err)
	}
	_, err = OpenDir(path, OS())
	if !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), fmt.Sprintf("process %d", cmd.Process.Pid)) {
		t.Errorf("open a folder that process %d has: %v", cmd.Process.Pid, err)
	}
	testkit.Must(t, cmd.Process.Kill())
	_ = cmd.Wait() // killed
	_ = stdin.Close()
	dir, err := OpenDir(path, OS())
	if err != nil {
		t.Fatalf("after its end: %v", err)
	}
	testkit.NoError(t, dir.Close())
}

// writer appends records with numbers from first on in several goroutines, saves and trims, and prints each number when
// the record is durable, until the process is killed.
func writer(path, first string) error {
	from, err := strconv.ParseUint(first, 10, 64)
	if err != nil {
		return err
	}
	dir, err := OpenDir(path, OS())
	if err != nil {
		return err
	}
	l, err := Open(Config{Dir: dir, Name: "q", SegmentBytes: 8 << 10, MaxBody: 1 << 12, Durable: true})
	if err != nil {
		return err
	}
	var mu sync.Mutex
	var wg sync.WaitGroup
	errs := make([]error, 9)
	for w := range errs[1:] {
		wg.Go(func() {
			for {
				mu.Lock()
				id := from
				from += 2
				at, err := l.Append([]Record{numbered(id), numbered(id + 1)})
				mu.Unlock()
				if err == nil {
					err = l.Sync(at + 2)
				}
				if err != nil {
					errs[w] = err
					return
				}
				os.Stdout.WriteString(fmt.Sprintf("%d %d\n%d %d\n", at, id, at+1, id+1)) // one write
			}
		})
	}
	wg.Go(func() {
		for n := uint64(0); errs[8] == nil; n++ {
			errs[8] = l.SaveCursors(binary.BigEndian.AppendUint64(nil, n))
		}
	})
	wg.Wait()
	return errors.Join(errs...)
}

// A process is killed again and again while the process writes. Each record that the process reported as durable exists
// at its offset, and so does a snapshot of the cursors.
func TestKilledWhileWriting(t *testing.T) {
	rng := testkit.Rand(t)
	path := t.TempDir()
	acknowledged := map[Offset]uint64{}
	first := uint64(1)
	for range 5 {
		cmd := self(t)
		out := startChild(t, cmd, fmt.Sprintf("writer %s %d", path, first))
		more := true
		for lines := 1 + rng.IntN(600); more; lines-- {
			if lines == 0 {
				if err := cmd.Process.Kill(); err != nil { // output written before the kill is still read
					t.Fatal(err)
				}
			}
			var at Offset
			var id uint64
			line, err := out.ReadString('\n')
			if more = err == nil; !more {
				break
			}
			if _, err := fmt.Sscan(line, &at, &id); err != nil {
				t.Fatalf("the writer says %q", line)
			}
			acknowledged[at] = id
		}
		_ = cmd.Wait() // killed

		dir := testkit.Result(OpenDir(path, OS())).Must(t)
		l, err := Open(Config{Dir: dir, Name: "q", SegmentBytes: 8 << 10, MaxBody: 1 << 12})
		testkit.Must(t, err)
		there := 0
		var b Batch
		for {
			testkit.Must(t, l.Read(b.Next, Limit{100, 1 << 20}, &b))
			if len(b.Records) == 0 {
				break
			}
			for _, r := range b.Records {
				id := testkit.Result(numberOf(r)).Must(t)
				first = max(first, id+1000)
				if was, ok := acknowledged[r.Offset]; ok {
					if there++; was != id {
						t.Fatalf("offset %d has record %d, and had %d", r.Offset, id, was)
					}
				}
			}
		}
		if there != len(acknowledged) {
			t.Fatalf("%d of %d records are there", there, len(acknowledged))
		}
		if s, err := l.LoadCursors(); err != nil || len(s) != 8 && len(acknowledged) > 100 {
			t.Errorf("cursors %x, %v", s, err)
		}
		if s := l.Stats(); s.Quarantined+s.Missing > 0 {
			t.Errorf("damage by a kill: %+v", s)
		}
		testkit.Must(t, errors.Join(l.Close(), dir.Close()))
	}
}

// The test calls each operation of the real disk.
func TestOSDiskOperations(t *testing.T) {
	d := OS()
	path := t.TempDir()
	_, err := d.Open(path + "/a")
	testkit.ErrorIs(t, err, os.ErrNotExist, "open what is not there")
	f := testkit.Result(d.Create(path + "/a")).Must(t)
	_, err = d.Create(path + "/a")
	testkit.ErrorIs(t, err, os.ErrExist, "create what is there")
	_, err = f.WriteAt([]byte("hello"), 3)
	testkit.NoError(t, err)
	testkit.NoError(t, errors.Join(f.Sync(), f.Truncate(6)))
	testkit.Result(f.Size()).Equal(t, 6, "size")
	b := make([]byte, 8)
	if n, err := f.ReadAt(b, 0); n != 6 || string(b[:n]) != "\x00\x00\x00hel" || !errors.Is(err, io.EOF) {
		t.Errorf("read %q, %v", b[:n], err)
	}
	testkit.NoError(t, errors.Join(d.Mkdir(path+"/sub"), d.Rename(path+"/a", path+"/sub/b"), d.SyncDir(path), f.Close()))
	if err := f.Sync(); err == nil {
		t.Error("sync of a closed file: no error")
	}
	if err := d.Remove(path + "/sub"); err == nil {
		t.Error("remove a folder with a file: no error")
	}
	if names, err := d.List(path + "/sub"); len(names) != 1 || names[0] != "b" || err != nil {
		t.Errorf("list %q, %v", names, err)
	}
	testkit.NoError(t, errors.Join(d.Remove(path+"/sub/b"), d.Remove(path+"/sub")))
	testkit.ErrorIs(t, d.Mkdir(path+"/x/y"), os.ErrNotExist, "mkdir in what is not there")
}

// filler fills the disk of path, as the process's own mounts show the disk.
func filler(path string) error {
	dir, err := OpenDir(path, OS())
	if err != nil {
		return err
	}
	cfg := Config{Dir: dir, Name: "q", SegmentBytes: 128 << 10, MaxBody: 1 << 16}
	l, err := Open(cfg)
	if err != nil {
		return err
	}
	for round := range 5 {
		n := 0
		for err = nil; err == nil; n++ {
			if _, err = l.Append([]Record{{Body: make([]byte, 1000)}, {Body: make([]byte, 1000)}}); n > 100_000 {
				return errors.New("the disk does not fill")
			}
		}
		if !errors.Is(err, ErrNoSpace) || n < 100 {
			return fmt.Errorf("round %d: %d batches fit: %w", round, n, err)
		}
		s := l.Stats()
		if s.Records != int64(s.Next-s.First) {
			return fmt.Errorf("%d records from %d to %d", s.Records, s.First, s.Next)
		}
		if err := l.Trim(s.First + (s.Next-s.First)/2); err != nil {
			return fmt.Errorf("make room: %w", err)
		}
		if err := l.SaveCursors(make([]byte, 10_000)); err != nil {
			return err
		}
		if round%2 == 1 {
			if err := l.Close(); err != nil {
				return err
			}
			if l, err = Open(cfg); err != nil {
				return err
			}
			if s := l.Stats(); s.Torn+s.Quarantined+s.Missing > 0 {
				return fmt.Errorf("after reopening: %+v", s)
			}
		}
	}
	return errors.Join(l.Remove(), dir.Close())
}
