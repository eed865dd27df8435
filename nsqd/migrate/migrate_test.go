package migrate_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/nsq/wire"
	"github.com/srtm-io/srtm/nsqd/commitlog"
	"github.com/srtm-io/srtm/nsqd/metadata"
	"github.com/srtm-io/srtm/nsqd/migrate"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// unpack creates a folder as NSQ's nsqd 1.3.0 left the folder at a stop. Eleven messages were published to topic t with
// the channels a, b (paused later) and, from the seventh message on, late: "body 1" to "body 10", and a deferred
// message. Channel a consumed three messages. Two messages were in memory. Five messages were published to topic u,
// which has no channel.
func unpack(t *testing.T) *place {
	t.Helper()
	p := newPlace(t)
	text := testkit.Result(os.ReadFile(filepath.Join("testdata", "nsq.tgz"))).Must(t)
	zip, err := gzip.NewReader(bytes.NewReader(text))
	testkit.Must(t, err)
	for r := tar.NewReader(zip); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return p
		}
		testkit.Must(t, err)
		path := filepath.Join(p.data, filepath.FromSlash(h.Name))
		if h.Typeflag == tar.TypeDir {
			err = os.MkdirAll(path, 0o700)
		} else {
			b, _ := io.ReadAll(r)
			err = errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, b, 0o600))
		}
		testkit.Must(t, err)
	}
}

// place is a broker's folder.
type place struct {
	t    *testing.T
	data string
	logs bytes.Buffer

	unwanted error
}

func newPlace(t *testing.T) *place {
	p := &place{t: t, data: t.TempDir()}
	testkit.Must(t, os.MkdirAll(p.path("messages"), 0o700))
	return p
}

func (p *place) path(name string) string { return filepath.Join(p.data, name) }

// imports runs the import and returns the content of the logs.
func (p *place) imports() (migrate.Report, error) {
	p.t.Helper()
	dir := testkit.Result(commitlog.OpenDir(p.path("messages"), commitlog.OS())).Must(p.t)
	defer dir.Close()
	return migrate.Import(migrate.Config{
		Data: p.data, Messages: p.path("messages"), Metadata: p.path("metadata.json"), Dir: dir,
		Log:      commitlog.Config{SegmentBytes: 1 << 10, MaxBody: 1000, Durable: true},
		Unwanted: p.unwanted,
		Cursors:  func(t migrate.Topic) []byte { return fmt.Append(nil, t.Name, t.Channels, t.Released, t.Next) },
		Logger:   slog.New(slog.NewTextHandler(&p.logs, nil)),
	})
}

// logged is the content of one log.
type logged struct {
	cursors string
	records []commitlog.Record
}

// all returns the content of all logs.
func (p *place) all() map[string]logged {
	p.t.Helper()
	dir := testkit.Result(commitlog.OpenDir(p.path("messages"), commitlog.OS())).Must(p.t)
	defer dir.Close()
	names := testkit.Result(dir.Logs()).Must(p.t)
	all := map[string]logged{}
	for _, name := range names {
		l := testkit.Result(commitlog.Open(commitlog.Config{Dir: dir, Name: name})).Must(p.t)
		cursors := testkit.Result(l.LoadCursors()).Must(p.t)
		in := logged{cursors: string(cursors)}
		for next := commitlog.Offset(0); ; {
			var b commitlog.Batch
			testkit.Must(p.t, l.Read(next, commitlog.Limit{Records: 100, Bytes: 1 << 20}, &b))
			if len(b.Records) == 0 {
				break
			}
			in.records, next = append(in.records, b.Records...), b.Next
		}
		all[name] = in
		testkit.Must(p.t, l.Close())
	}
	return all
}

// bodies returns the messages that a channel gets.
func (l logged) bodies(channel string) string {
	var texts []string
	for _, r := range l.records {
		if len(r.Channel) == 0 || string(r.Channel) == channel {
			texts = append(texts, strings.TrimPrefix(string(r.Body), "body "))
		}
	}
	return strings.Join(texts, " ")
}

func (p *place) files() []string {
	p.t.Helper()
	var names []string
	err := filepath.WalkDir(p.data, func(path string, d fs.DirEntry, err error) error {
		if !d.IsDir() && d.Name() != "lock" {
			rel, _ := filepath.Rel(p.data, path)
			names = append(names, filepath.ToSlash(rel))
		}
		return err
	})
	testkit.Must(p.t, err)
	return names
}

func TestWhatIsLeftComesOver(t *testing.T) {
	p := unpack(t)
	before := p.files()
	report := testkit.Result(p.imports()).Must(t)
	all := p.all()
	tl, ul := all["t"], all["u"]
	testkit.MustEqual(t, len(all), 2, "logs %v", all)
	for _, want := range []struct{ got, want string }{ // NSQ's nsqd put the messages from memory last
		{tl.bodies("a"), "3 4 5 6 7 8 9 10 deferred"}, {tl.bodies("b"), "1 2 3 4 5 6 7 8 9 10 deferred"}, {tl.bodies("late"), "7 8 9 10 deferred"},
		{ul.bodies(""), "ubody 1 ubody 2 ubody 3 ubody 4 ubody 5"},
	} {
		testkit.Equal(t, sorted(want.got), sorted(want.want), "bodies")
	}
	shared := 0
	for _, r := range tl.records {
		if len(r.Channel) == 0 {
			shared++
		}
		if r.Timestamp == 0 || r.ID[0] == 0 {
			t.Errorf("%+v", r)
		}
	}
	if shared < 3 {
		t.Errorf("%d records are for all channels", shared)
	}
	n := len(tl.records)
	if want := fmt.Sprint("t", []string{"a", "b", "late"}, n, n); tl.cursors != want || ul.cursors != fmt.Sprint("u", []string{}, 0, 5) {
		t.Errorf("cursors %q, want %q, and %q", tl.cursors, want, ul.cursors)
	}
	if report.Unreadable != 0 || report.Messages != n+5 || len(report.Topics) != 2 {
		t.Errorf("%+v", report)
	}
	state, err := metadata.Read(p.path("metadata.json"))
	if err != nil || len(state.Topics) != 2 || len(state.Topics[0].Channels) != 3 || !state.Topics[0].Channels[1].Paused || state.Topics[0].Channels[0].Paused {
		t.Errorf("metadata %+v, %v", state, err)
	}
	for _, file := range p.files() {
		if strings.HasSuffix(file, ".dat") {
			t.Errorf("%s is still there", file)
		}
	}
	for _, file := range before {
		if _, err := os.Stat(p.path(file + ".imported")); err != nil {
			t.Errorf("%s: %v", file, err)
		}
	}
	// A second import changes nothing.
	files := p.files()
	if report, err := p.imports(); err != nil || report.Messages+len(report.Topics) > 0 {
		t.Errorf("again: %+v, %v", report, err)
	}
	testkit.EqualSlices(t, p.files(), files, "files after the second import")
}

func sorted(s string) string {
	words := strings.Fields(s)
	slices.Sort(words)
	return strings.Join(words, " ")
}

// The process ends at any place: before a topic's log has its final name, or before the log's source files are deleted.
func TestAnImportThatWasInterruptedIsDoneOnce(t *testing.T) {
	whole := unpack(t)
	testkit.Result(whole.imports()).Must(t)
	want := whole.all()

	p := unpack(t)
	// One log is in progress. The other has its final name and a list of files, half of them processed.
	testkit.Must(t, os.CopyFS(p.path("messages/t##import.log"), os.DirFS(whole.path("messages/t.log"))))
	testkit.Must(t, os.CopyFS(p.path("messages/u.log"), os.DirFS(whole.path("messages/u.log"))))
	var list []string
	for _, file := range p.files() {
		if strings.HasPrefix(filepath.Base(file), "u.diskqueue") {
			list = append(list, ".imported "+p.path(file))
		}
	}
	testkit.Must(t, os.WriteFile(p.path("messages/u.log/imported"), []byte(strings.Join(list, "\n")+"\n.imported "+p.path("was/done/before")+"\n"), 0o600))
	testkit.Result(p.imports()).Must(t)
	got := p.all()
	for _, topic := range []string{"t", "u"} {
		if got[topic].cursors != want[topic].cursors || got[topic].bodies("a") != want[topic].bodies("a") {
			t.Errorf("%s has %+v, want %+v", topic, got[topic], want[topic])
		}
	}
	testkit.EqualSlices(t, p.files(), whole.files(), "files")
}

func TestWhatCannotBeReadIsKeptAndSaid(t *testing.T) {
	flip := func(t *testing.T, path string, at int) {
		t.Helper()
		b, err := os.ReadFile(path)
		if err == nil {
			b[at] ^= 0x40
			err = os.WriteFile(path, b, 0o600)
		}
		testkit.Must(t, err)
	}
	t.Run("of NSQ", func(t *testing.T) {
		p := unpack(t)
		flip(t, p.path("t:b.diskqueue.000000.dat"), 1) // a length
		testkit.Must(t, os.WriteFile(p.path("t:late.diskqueue.meta.dat"), []byte("what"), 0o600))
		testkit.Must(t, os.WriteFile(p.path("a b.diskqueue.000000.dat"), []byte("m"), 0o600))
		report, err := p.imports()
		if err != nil || report.Unreadable != 2 {
			t.Fatalf("%+v, %v", report, err)
		}
		got := p.all()["t"]
		if n := len(strings.Fields(got.bodies("b"))); n != 6 || len(strings.Fields(got.bodies("late"))) != 5 {
			t.Errorf("%q, %q", got.bodies("b"), got.bodies("late"))
		}
		for _, kept := range []string{"t:b.diskqueue.000000.dat.unreadable", "t:late.diskqueue.meta.dat.unreadable", "a b.diskqueue.000000.dat"} {
			_, err := os.Stat(p.path(kept))
			testkit.NoError(t, err)
		}
	})
	t.Run("of NSQ, one message of several files", func(t *testing.T) {
		p := unpack(t)
		flip(t, p.path("t:b.diskqueue.000000.dat"), 1) // a length
		testkit.Result(p.imports()).Must(t)
		for _, file := range p.files() {
			if is, want := strings.HasSuffix(file, ".unreadable"), strings.HasPrefix(file, "t:b.diskqueue.000000.dat."); strings.Contains(file, "diskqueue") && is != want {
				t.Errorf("%s, of %q: only the file with the message is unreadable", file, p.files())
			}
		}
	})
	t.Run("of NSQ, written in part", func(t *testing.T) {
		whole := testkit.Result(os.ReadFile(unpack(t).path("t:a.diskqueue.meta.dat"))).Must(t)
		p := unpack(t)
		testkit.Result(p.imports()).Must(t)
		must := strings.Fields(p.all()["t"].bodies("a"))
		for n := range whole {
			p := unpack(t)
			testkit.Must(t, os.WriteFile(p.path("t:a.diskqueue.meta.dat"), whole[:n], 0o600))
			testkit.Result(p.imports()).Must(t)
			got := strings.Fields(p.all()["t"].bodies("a"))
			for _, body := range must {
				if !slices.Contains(got, body) {
					t.Errorf("%q, of %q: %q is not there, only %q", whole[:n], whole, body, got)
				}
			}
		}
	})
	t.Run("topics of NSQ", func(t *testing.T) {
		p := unpack(t)
		testkit.Must(t, os.WriteFile(p.path("nsqd.dat"), []byte("{"), 0o600))
		before := p.files()
		_, err := p.imports()
		testkit.ErrorHas(t, err, "nsqd.dat")
		if after := p.files(); !slices.Equal(after, before) {
			t.Errorf("%v became %v", before, after)
		}
	})
}

// The broker refuses a log beside messages that NSQ's nsqd has written since the import, because the broker does not know which
// messages come first.
func TestALogBesideQueuesIsRefused(t *testing.T) {
	p := unpack(t)
	testkit.Result(p.imports()).Must(t)
	again := unpack(t)
	for _, file := range again.files() {
		testkit.Must(t, os.Link(again.path(file), p.path(file)))
	}
	before := p.files()
	_, err := p.imports()
	testkit.ErrorHas(t, err, "topic t")
	testkit.EqualSlices(t, p.files(), before, "files")
}

// A user who goes back to NSQ's nsqd and imports again keeps the files of each import.
func TestWhatWasSetAsideStays(t *testing.T) {
	p, want := unpack(t), map[string]string{}
	for _, suffix := range []string{".imported", ".imported.1", ".imported.2"} {
		again := unpack(t)
		for _, file := range again.files() {
			text := testkit.Result(os.ReadFile(again.path(file))).Must(t)
			if strings.HasSuffix(file, "nsqd.dat") {
				text = append(text, strings.Repeat(" ", len(suffix))...) // the same content to JSON
			}
			testkit.Must(t, os.WriteFile(p.path(file), text, 0o600))
			want[file+suffix] = string(text)
		}
		testkit.Result(p.imports()).Must(t)
		testkit.Must(t, os.RemoveAll(p.path("messages"))) // all messages were delivered
		testkit.Must(t, os.Mkdir(p.path("messages"), 0o700))
	}
	for file, text := range want {
		testkit.Equal(t, string(testkit.Result(os.ReadFile(p.path(file))).Must(t)), text, "%s", file)
	}
}

func TestAFolderThatNSQUsesIsRefused(t *testing.T) {
	p := unpack(t)
	folder, err := os.Open(p.data)
	if err == nil {
		err = syscall.Flock(int(folder.Fd()), syscall.LOCK_EX)
	}
	testkit.Must(t, err)
	before := p.files()
	_, err = p.imports()
	testkit.ErrorIs(t, err, syscall.EWOULDBLOCK)
	if after := p.files(); !slices.Equal(after, before) {
		t.Errorf("%v became %v", before, after)
	}
	testkit.NoError(t, folder.Close())
	_, err = p.imports()
	testkit.NoError(t, err)
}

// The broker's own metadata file does not come from another nsqd, and the error must not say so.
func TestDamagedMetadataIsNoImport(t *testing.T) {
	p := newPlace(t)
	testkit.Must(t, os.WriteFile(p.path("metadata.json"), []byte("{x"), 0o600))
	_, err := p.imports()
	testkit.ErrorIs(t, err, metadata.ErrDamaged)
	if strings.Contains(err.Error(), "import") {
		t.Error(err)
	}
}

// NSQ's files may be links to another disk.
func TestLinksAreFollowed(t *testing.T) {
	whole := unpack(t)
	testkit.Result(whole.imports()).Must(t)
	p, elsewhere := unpack(t), t.TempDir()
	for _, path := range testkit.Result(filepath.Glob(p.path("*.dat"))).Must(t) {
		to := filepath.Join(elsewhere, filepath.Base(path))
		testkit.Must(t, os.Rename(path, to))
		testkit.Must(t, os.Symlink(to, path))
	}
	there := testkit.Result(os.ReadDir(elsewhere)).Must(t)
	testkit.Result(p.imports()).Must(t)
	for _, channel := range []string{"a", "b", "late"} {
		testkit.Equal(t, p.all()["t"].bodies(channel), whole.all()["t"].bodies(channel), "what channel %s gets", channel)
	}
	testkit.EqualSlices(t, p.files(), whole.files(), "files")
	testkit.Equal(t, len(testkit.Result(os.ReadDir(elsewhere)).Must(t)), len(there), "files at the end of the links")
}

// The import refuses an entry that has a name of NSQ's and is no file, names the entry and changes nothing. A link may
// point to a disk that is not mounted.
func TestWhatIsNoFileIsRefused(t *testing.T) {
	for name, make := range map[string]func(path string) error{
		"a link to what is not there": func(path string) error { return os.Symlink("/not/there", path) },
		"a link to itself":            func(path string) error { return os.Symlink(path, path) },
		"a pipe":                      func(path string) error { return syscall.Mkfifo(path, 0o600) },
		"a link to a device":          func(path string) error { return os.Symlink("/dev/zero", path) },
		"a folder":                    func(path string) error { return os.Mkdir(path, 0o700) },
	} {
		for _, file := range []string{"nsqd.dat", "t:b.diskqueue.meta.dat", "t:b.diskqueue.000000.dat"} {
			p := unpack(t)
			testkit.Must(t, os.RemoveAll(p.path(file)))
			testkit.Must(t, make(p.path(file)))
			before := p.files()
			_, err := p.imports()
			testkit.ErrorHas(t, err, p.path(file), "%s is %s", file, name)
			testkit.EqualSlices(t, p.files(), before, "files, where %s is %s", file, name)
		}
	}
}

// NSQ writes numbers with at least six digits. A file with a shorter number is not NSQ's, and the import reads NSQ's
// files once.
func TestNumbersThatNSQDoesNotWrite(t *testing.T) {
	p := unpack(t)
	for _, number := range []string{"0", "7", "0000000"} {
		text := testkit.Result(os.ReadFile(p.path("t:b.diskqueue.000000.dat"))).Must(t)
		testkit.Must(t, os.WriteFile(p.path("t:b.diskqueue."+number+".dat"), text, 0o600))
	}
	testkit.Result(p.imports()).Must(t)
	testkit.Equal(t, sorted(p.all()["t"].bodies("b")), sorted("1 2 3 4 5 6 7 8 9 10 deferred"), "what channel b gets")
	testkit.Equal(t, strings.Count(p.logs.String(), "level=ERROR"), 3, "lines of the log")
}

// The import detects a queue whose end or a file in the middle is missing.
func TestWhatIsMissingIsSaid(t *testing.T) {
	meta := func(p *place, text string) error {
		return os.WriteFile(p.path("t:b.diskqueue.meta.dat"), []byte(text), 0o600)
	}
	for name, change := range map[string]func(p *place) error{
		"the file is cut before the place to resume at": func(p *place) error { return meta(p, "5\n0,100000\n0,200000\n") },
		"a file in the middle is missing": func(p *place) error {
			return os.Remove(p.path("t:b.diskqueue.000001.dat"))
		},
		"the last file is missing":      func(p *place) error { return meta(p, "5\n0,0\n3,100\n") },
		"a place that no one can write": func(p *place) error { return meta(p, "5\n"+strings.Repeat("0", 1<<20)+"0,0\n3,0\n") },
	} {
		p := unpack(t)
		testkit.Must(t, change(p))
		report := testkit.Result(p.imports()).Must(t)
		testkit.Equal(t, report.Unreadable, 1, "unreadable, where %s", name)
	}
}

// If messages cannot be imported, the import leaves the files unchanged.
func TestMessagesThatAreNotWantedAreRefused(t *testing.T) {
	p := unpack(t)
	p.unwanted = errors.New("not here")
	before := p.files()
	_, err := p.imports()
	testkit.ErrorIs(t, err, p.unwanted)
	testkit.EqualSlices(t, p.files(), before, "files")
}

func TestNothingIsNothing(t *testing.T) {
	p := newPlace(t)
	testkit.Must(t, os.WriteFile(p.path("nsqd.dat"), []byte(`{"topics":[{"name":"e","channels":[{"name":"c","paused":true},{"name":"x#ephemeral"}]},{"name":"y#ephemeral"}],"version":"1.3.0"}`), 0o600))
	report, err := p.imports()
	if err != nil || len(report.Topics) != 0 {
		t.Errorf("%+v, %v", report, err)
	}
	state, err := metadata.Read(p.path("metadata.json"))
	if err != nil || len(state.Topics) != 1 || len(state.Topics[0].Channels) != 1 || !state.Topics[0].Channels[0].Paused {
		t.Errorf("%+v, %v", state, err)
	}
}

// A file of messages may have any content.
func FuzzNSQ(f *testing.F) {
	message := func(body string) []byte {
		b := binary.BigEndian.AppendUint32(nil, uint32(26+len(body)))
		b = append(b, make([]byte, 10)...)
		return append(append(b, "0123456789abcdef"...), body...)
	}
	f.Add(slices.Concat(message("a"), message("b")), 1)
	f.Add(message("a")[:20], 0)
	f.Add([]byte{0xff, 0xff, 0xff, 0xff}, 0)
	f.Fuzz(func(t *testing.T, b []byte, place int) {
		p := newPlace(t)
		for name, text := range map[string]string{"t:c.diskqueue.000000.dat": string(b), "t:c.diskqueue.meta.dat": fmt.Sprintf("1\n0,%d\n0,9\n", place),
			"t:c.diskqueue.000001.dat": string(message("last"))} {
			testkit.Must(t, os.WriteFile(p.path(name), []byte(text), 0o600))
		}
		testkit.Result(p.imports()).Must(t)
		l := p.all()["t"]
		if n := len(l.records); n == 0 || string(l.records[n-1].Body) != "last" && !slices.ContainsFunc(l.records, func(r commitlog.Record) bool { return string(r.Body) == "last" }) {
			t.Errorf("%+v", l)
		}
	})
}

// The files of topics and of read positions may have any content, too. The log has the content of an imported file, and
// a file that is not imported is unchanged.
func FuzzNSQState(f *testing.F) {
	message := append(append(binary.BigEndian.AppendUint32(nil, 30), make([]byte, 10)...), "0123456789abcdefbody"...)
	for _, topics := range []string{`{"topics":[{"name":"t","paused":true,"channels":[{"name":"c","paused":false}]}],"version":"1.3.0"}`, `{"topics":[{"name":"a b"},{"name":"t"},{"name":"t"}]}`, "{", ""} {
		for _, meta := range []string{"1\n0,0\n0,34\n", "1\n0,34\n1,0\n", "1\n3,0\n0,34\n", "-1\n-1,-1\n-1,-1\n", "1\n0,", ""} {
			f.Add([]byte(topics), []byte(meta))
		}
	}
	f.Fuzz(func(t *testing.T, topics, meta []byte) {
		p := newPlace(t)
		for name, text := range map[string][]byte{"nsqd.dat": topics, "t:c.diskqueue.meta.dat": meta, "t:c.diskqueue.000000.dat": message} {
			testkit.Must(t, os.WriteFile(p.path(name), text, 0o600))
		}
		before := p.files()
		if _, err := p.imports(); err != nil {
			testkit.EqualSlices(t, p.files(), before, "files after %v", err)
			return
		}
		for _, file := range before {
			if _, err := os.Stat(p.path(file)); err == nil {
				t.Errorf("%s is there after the import", file)
			}
		}
		state, err := metadata.Read(p.path("metadata.json"))
		testkit.Must(t, err)
		for _, topic := range state.Topics {
			if !wire.ValidTopicName(topic.Name) {
				t.Errorf("a topic %q", topic.Name)
			}
		}
	})
}
