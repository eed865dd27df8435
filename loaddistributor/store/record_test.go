package store

import (
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/srtm-io/srtm/api/srtm/journal"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
)

func history(t testing.TB) (*leader, [][]byte) {
	m := &Memory{}
	l := lead(t, m)
	l.appendEveryEvent()
	return l, m.mu.records
}

// The records of a history, and a dump of it as a record or as text, restore the catalog of the
// history.
func TestRecordsMakeTheCatalogAgain(t *testing.T) {
	l, records := history(t)
	l.cat.Name(17)
	cat := catalog.New()
	cat.Name(17)
	for i, r := range records {
		testkit.Must(t, replay(cat, uint64(i+1), r))
	}
	want := l.cat.Dump()
	if got := cat.Dump(); !reflect.DeepEqual(got, want) {
		t.Errorf("the events give\n%+v\nwant\n%+v", got, want)
	}
	dump := testkit.Result(encodeDump(want)).Must(t)
	if got := testkit.Result(decodeDump(dump)).Must(t); !reflect.DeepEqual(got, want) {
		t.Errorf("the dump is\n%+v\nwant\n%+v", got, want)
	}
	text := testkit.Result(Export(want)).Must(t)
	if got := testkit.Result(Import(text)).Must(t); !reflect.DeepEqual(got, want) {
		t.Errorf("the text is\n%s\nwhich gives\n%+v\nwant\n%+v", text, got, want)
	}
}

// Every event of the catalog has a record, and the history above contains each event.
func TestEveryEventHasARecord(t *testing.T) {
	files := testkit.Result(filepath.Glob(filepath.Join("..", "catalog", "*.go"))).Must(t)
	var events []string
	for _, name := range files {
		file := testkit.Result(parser.ParseFile(token.NewFileSet(), name, nil, 0)).Must(t)
		for _, d := range file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Name.Name == "apply" {
				events = append(events, f.Recv.List[0].Type.(*ast.Ident).Name)
			}
		}
	}
	if len(events) < 16 {
		t.Fatalf("found only %v", events)
	}
	_, records := history(t)
	covered := map[string]bool{}
	for _, r := range records {
		e := testkit.Result(decodeEvent(r)).Must(t)
		covered[reflect.TypeOf(e).Name()] = true
	}
	for _, name := range events {
		if !covered[name] {
			t.Errorf("catalog.%s is not in the history of the suite", name)
		}
	}
}

func TestRecordsThatAreRefused(t *testing.T) {
	record := func(name string, m proto.Message) []byte { return testkit.Result(encode(name, m)).Must(t) }
	// withUnknown appends a field 1000 to a message, as a later release may write it.
	withUnknown := func(m proto.Message) proto.Message {
		m.ProtoReflect().SetUnknown(protowire.AppendVarint(protowire.AppendTag(nil, 1000, protowire.VarintType), 1))
		return m
	}
	moved := record("topic_moved", &journal.Event{Topic: "t"})
	spec := &journal.Spec{Name: "t", Rate: 1, RateMilli: 1000, Burst: 1, Groups: []*journal.Group{{Count: 2_000_000_000, Rate: 1}}}
	for name, one := range map[string]struct {
		record []byte
		part   string
	}{
		"a kind of a later release":          {testkit.Result(proto.Marshal(withUnknown(&journal.Record{}))).Must(t), "another release"},
		"a field of a later release":         {record("topic_moved", withUnknown(&journal.Event{})), "field that this program does not know"},
		"a field of a later release, inside": {record("topic_moving", &journal.Order{Spec: spec, Plan: withUnknown(&journal.Plan{}).(*journal.Plan)}), "field that"},
		"a snapshot":                         {record(kindSnapshot, &journal.Snapshot{}), "does not belong here"},
		"a topic that a broker keeps":        {record(kindTopic, &journal.Kept{}), "does not belong here"},
		"no specification":                   {record("topic_placed", &journal.Order{Plan: &journal.Plan{}}), "no specification"},
		"a group that is too large":          {record("topic_placed", &journal.Order{Spec: spec, Plan: &journal.Plan{}}), "outside"},
		"half a record":                      {moved[:len(moved)-1], "damaged"},
		"JSON":                               {[]byte(`{"v":1,"kind":"restarted","data":{}}`), "another release"},
		"nothing":                            {nil, "does not belong here"},
	} {
		_, err := decodeEvent(one.record)
		if !errors.As(err, new(*FormatError)) || !strings.Contains(err.Error(), one.part) {
			t.Errorf("%s: %v, want %q", name, err, one.part)
		}
	}
	if _, err := Import([]byte(`{"version":"3","colour":"red"}`)); !errors.As(err, new(*FormatError)) {
		t.Errorf("a text with an unknown field: %v", err)
	}
}

// Any bytes on disk decode to an error, or to an event that is encoded to bytes with the same meaning.
func FuzzRecord(f *testing.F) {
	l, records := history(f)
	for _, r := range append(records, testkit.Result(encodeDump(l.cat.Dump())).Must(f)) {
		f.Add(r)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if !small(b) {
			return // sound, and only slow
		}
		if e, err := decodeEvent(b); err == nil {
			again, err := encodeEvent(e)
			testkit.Must(t, err)
			if e2, err := decodeEvent(again); err != nil || !reflect.DeepEqual(e, e2) {
				t.Fatalf("%+v became %+v, %v", e, e2, err)
			}
		} else if e != nil {
			t.Fatalf("an event and an error: %+v, %v", e, err)
		}
		if d, err := decodeDump(b); err == nil {
			if _, err := catalog.Load(d); err != nil {
				return
			}
			again, err := encodeDump(d)
			testkit.Must(t, err)
			if d2, err := decodeDump(again); err != nil || len(d2.Topics) != len(d.Topics) || d2.Version != d.Version {
				t.Fatalf("%+v became %+v, %v", d, d2, err)
			}
		}
	})
}

// small reports whether no group of the record is expanded to many publishers.
func small(b []byte) bool {
	var record journal.Record
	if proto.Unmarshal(b, &record) != nil {
		return true
	}
	return publishers(record.ProtoReflect()) < 10_000
}

// publishers counts the members of all groups in m.
func publishers(m protoreflect.Message) (n float64) {
	if g, ok := m.Interface().(*journal.Group); ok {
		return float64(g.Count)
	}
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case f.Message() == nil || f.IsMap():
		case f.IsList():
			for i := range v.List().Len() {
				n += publishers(v.List().Get(i).Message())
			}
		default:
			n += publishers(v.Message())
		}
		return true
	})
	return n
}
