package diskqueue

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

// The tests in this file use the operating system's disk, and processes of
// their own: this binary again, with childEnv saying what it is to be.
const childEnv = "SRTM_DISKQUEUE_CHILD"

// child is main of such a process. role is a name and arguments, separated by
// spaces.
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

// start starts a child, which is killed at the end of the test at the latest.
func startChild(t *testing.T, cmd *exec.Cmd, role string) *bufio.Reader {
	t.Helper()
	cmd.Env = append(os.Environ(), childEnv+"="+role)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // it has ended, in most tests
		_ = cmd.Wait()
	})
	return bufio.NewReader(out)
}

func self(t *testing.T) *exec.Cmd {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return exec.Command(path)
}

// holder opens a folder and keeps it until it is killed.
func holder(path string) error {
	if _, err := OpenDir(path, OS()); err != nil {
		return err
	}
	fmt.Println("holding")
	_, err := io.Copy(io.Discard, os.Stdin)
	return err
}

func TestFolderBelongsToOneProcess(t *testing.T) {
	path := t.TempDir() + "/made/on/the/way"
	cmd := self(t)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out := startChild(t, cmd, "holder "+path)
	if line, err := out.ReadString('\n'); line != "holding\n" {
		t.Fatalf("%q, %v", line, err)
	}
	_, err = OpenDir(path, OS())
	if !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), fmt.Sprintf("process %d", cmd.Process.Pid)) {
		t.Errorf("open a folder that process %d has: %v", cmd.Process.Pid, err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed
	_ = stdin.Close()
	dir, err := OpenDir(path, OS())
	if err != nil {
		t.Fatalf("after its end: %v", err)
	}
	if err := dir.Close(); err != nil {
		t.Error(err)
	}
}

// writer appends records with ids from first on, in several goroutines, and
// prints each id when it is durable, until it is killed.
func writer(path, first string) error {
	from, err := strconv.ParseUint(first, 10, 64)
	if err != nil {
		return err
	}
	dir, err := OpenDir(path, OS())
	if err != nil {
		return err
	}
	q, err := Open(Config{Dir: dir, Name: "q", SegmentBytes: 8 << 10, MaxRecord: 1 << 12})
	if err != nil {
		return err
	}
	var mu sync.Mutex
	var wg sync.WaitGroup
	errs := make([]error, 8)
	for w := range errs {
		wg.Go(func() {
			for {
				mu.Lock()
				batch := [][]byte{payload(from), payload(from + 1)}
				id := from
				from += 2
				end, err := q.Append(batch...)
				mu.Unlock()
				if err == nil {
					err = q.SyncTo(end)
				}
				if err != nil {
					errs[w] = err
					return
				}
				os.Stdout.WriteString(fmt.Sprintf("%d\n%d\n", id, id+1)) // one write
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// A process is killed while it writes, again and again. What it said is
// durable is there, once, in order.
func TestKilledWhileWriting(t *testing.T) {
	rng := testkit.Rand(t)
	path := t.TempDir()
	promised := map[uint64]bool{}
	first := uint64(1)
	for range 6 {
		cmd := self(t)
		out := startChild(t, cmd, fmt.Sprintf("writer %s %d", path, first))
		lines := 1 + rng.IntN(600)
		for range lines {
			line, err := out.ReadString('\n')
			if err != nil {
				t.Fatalf("%q, %v", line, err)
			}
			id, err := strconv.ParseUint(strings.TrimSpace(line), 10, 64)
			if err != nil {
				t.Fatalf("the writer says %q", line)
			}
			promised[id] = true
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		for { // what it said before it was killed
			line, err := out.ReadString('\n')
			if err != nil {
				break
			}
			if id, err := strconv.ParseUint(strings.TrimSpace(line), 10, 64); err == nil {
				promised[id] = true
			}
		}
		_ = cmd.Wait() // killed

		dir, err := OpenDir(path, OS())
		if err != nil {
			t.Fatal(err)
		}
		q, err := Open(Config{Dir: dir, Name: "q", SegmentBytes: 8 << 10, MaxRecord: 1 << 12})
		if err != nil {
			t.Fatal(err)
		}
		there := map[uint64]bool{}
		before := uint64(0)
		for _, data := range drain(t, q) {
			id, err := idOf(data)
			if err != nil || id <= before {
				t.Fatalf("record %d after %d: %v", id, before, err)
			}
			there[id], before = true, id
		}
		for id := range promised {
			if !there[id] {
				t.Fatalf("record %d is lost; there are %d, up to %d, of %d promised", id, len(there), before, len(promised))
			}
		}
		if q := q.Stats(); q.Quarantined > 0 {
			t.Errorf("%d segments damaged by a kill", q.Quarantined)
		}
		first = before + 1000
		if err := errors.Join(q.Close(), dir.Close()); err != nil {
			t.Fatal(err)
		}
	}
}

// The operations of the real disk, one by one.
func TestOSDisk(t *testing.T) {
	d := OS()
	path := t.TempDir()
	if _, err := d.Open(path + "/a"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("open what is not there: %v", err)
	}
	f, err := d.Create(path + "/a")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.Create(path + "/a"); !errors.Is(err, os.ErrExist) {
		t.Errorf("create what is there: %v", err)
	}
	if _, err := f.WriteAt([]byte("hello"), 3); err != nil {
		t.Error(err)
	}
	if err := errors.Join(f.Sync(), f.Truncate(6)); err != nil {
		t.Error(err)
	}
	if n, err := f.Size(); n != 6 || err != nil {
		t.Errorf("size %d, %v", n, err)
	}
	b := make([]byte, 8)
	if n, err := f.ReadAt(b, 0); n != 6 || string(b[:n]) != "\x00\x00\x00hel" || !errors.Is(err, io.EOF) {
		t.Errorf("read %q, %v", b[:n], err)
	}
	if err := errors.Join(d.Mkdir(path+"/sub"), d.Rename(path+"/a", path+"/sub/b"), d.SyncDir(path), f.Close()); err != nil {
		t.Error(err)
	}
	if err := f.Sync(); err == nil {
		t.Error("sync of a closed file: no error")
	}
	if err := d.Remove(path + "/sub"); err == nil {
		t.Error("remove a folder with a file: no error")
	}
	if names, err := d.List(path + "/sub"); len(names) != 1 || names[0] != "b" || err != nil {
		t.Errorf("list %q, %v", names, err)
	}
	if err := errors.Join(d.Remove(path+"/sub/b"), d.Remove(path+"/sub")); err != nil {
		t.Error(err)
	}
	if err := d.Mkdir(path + "/x/y"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("mkdir in what is not there: %v", err)
	}
}

// filler fills the disk that path is on, in the process's own view of it.
func filler(path string) error {
	dir, err := OpenDir(path, OS())
	if err != nil {
		return err
	}
	cfg := Config{Dir: dir, Name: "q", SegmentBytes: 128 << 10, MaxRecord: 1 << 16}
	q, err := Open(cfg)
	if err != nil {
		return err
	}
	next, done := uint64(1), uint64(1) // ids: to append, to be read
	record := func(id uint64) []byte {
		b := make([]byte, 1000)
		binary.BigEndian.PutUint64(b, id)
		return b
	}
	fill := func() error {
		for {
			_, err := q.Append(record(next), record(next+1), record(next+2))
			if errors.Is(err, ErrNoSpace) {
				return nil
			}
			if err != nil {
				return err
			}
			if next += 3; next > 100_000 {
				return errors.New("the disk does not fill")
			}
		}
	}
	take := func(upTo uint64) error {
		for done < upTo {
			records, err := q.Read(int(upTo-done), 1<<16, nil)
			if err != nil || len(records) == 0 {
				return fmt.Errorf("read %d: %d records, %w", done, len(records), err)
			}
			for _, r := range records {
				if id := binary.BigEndian.Uint64(r.Data); id != done {
					return fmt.Errorf("record %d, want %d", id, done)
				}
				done++
			}
			q.Release(records[len(records)-1].End)
		}
		return q.Checkpoint()
	}
	for round := range 5 {
		before := next
		if err := fill(); err != nil {
			return fmt.Errorf("fill: %w", err)
		}
		if next-before < 300 {
			return fmt.Errorf("only %d records fit in round %d", next-before, round)
		}
		if _, err := q.Append(record(next), record(next), record(next)); !errors.Is(err, ErrNoSpace) {
			return fmt.Errorf("append to a full disk: %w", err)
		}
		if err := take(done + (next-done)/2); err != nil { // without reopening
			return fmt.Errorf("make room: %w", err)
		}
		if round%2 == 1 {
			if err := q.Close(); err != nil {
				return err
			}
			if q, err = Open(cfg); err != nil {
				return err
			}
			if s := q.Stats(); s.Torn+s.Quarantined+s.Missing > 0 {
				return fmt.Errorf("after reopening: %+v", s)
			}
		}
	}
	if err := fill(); err != nil {
		return err
	}
	if err := take(next); err != nil {
		return fmt.Errorf("read the rest: %w", err)
	}
	if err := fill(); err != nil {
		return err
	}
	if err := q.Empty(); err != nil {
		return fmt.Errorf("empty on a full disk: %w", err)
	}
	return errors.Join(q.Remove(), dir.Close())
}
