package store

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/srtm-io/srtm/api/srtm/journal"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
)

var rewrite = flag.Bool("rewrite-records", false, "rewrite the records in testdata")

func history(t *testing.T) (*leader, [][]byte) {
	m := &Memory{}
	l := lead(t, m)
	l.every()
	return l, m.mu.records
}

// What earlier releases have written is read for ever: the records in testdata
// change only together with Version.
func TestRecordsOnDisk(t *testing.T) {
	l, records := history(t)
	l.cat.Name(17)
	dump, added, err := encodeDump(l.cat.Dump())
	testkit.Must(t, err)
	got := append(bytes.Join(append(records, dump, added), []byte("\n")), '\n')
	path := filepath.Join("testdata", "v1.jsonl")
	if *rewrite {
		testkit.Must(t, os.MkdirAll("testdata", 0o755))
		testkit.Must(t, os.WriteFile(path, got, 0o644))
	}
	want, err := os.ReadFile(path)
	testkit.Must(t, err)
	if !bytes.Equal(got, want) {
		t.Errorf("the records have changed; got\n%s\nwant\n%s", got, want)
	}
	cat := catalog.New()
	lines := bytes.Split(bytes.TrimSpace(want), []byte("\n"))
	cat.Name(17)
	for i, line := range lines[:len(lines)-2] {
		if err := replay(cat, uint64(i+1), line); err != nil {
			t.Fatalf("line %d: %v", i+1, err)
		}
	}
	loaded, err := decodeDump(lines[len(lines)-2], lines[len(lines)-1])
	if err != nil || !reflect.DeepEqual(loaded, cat.Dump()) {
		t.Errorf("%v: the dump is\n%+v\nthe events give\n%+v", err, loaded, cat.Dump())
	}
}

// Every event of the catalog has a record, and the history above has each.
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
	have := map[string]bool{}
	for _, r := range records {
		e := testkit.Result(decodeEvent(r)).Must(t)
		have[reflect.TypeOf(e).Name()] = true
	}
	for _, name := range events {
		if !have[name] {
			t.Errorf("catalog.%s is not in the history of the suite", name)
		}
	}
}

func TestRecordsThatAreRefused(t *testing.T) {
	for text, part := range map[string]string{
		`{"v":3,"kind":"restarted","data":{}}`:                        "version 3, this program knows 1 to 2",
		`{"kind":"restarted","data":{}}`:                              "version 0",
		`{"v":1,"kind":"invented","data":{}}`:                         "later release",
		`{"v":1,"kind":"snapshot","data":{}}`:                         "later release",
		`{"v":1,"kind":"topic_moved","data":{"topic":"t"}} {}`:        "damaged",
		`{"v":1,"kind":"topic_placed","data":{"plan":{"quotas":[]}}}`: "no specification",
		`{"v":1,"kind":"topic_placed","data":{"spec":{"name":"t","rate":1,"rate_milli":1000,"burst":1,"groups":[{"count":2000000000,"rate":1}]},"plan":{}}}`: "outside",
		`{"v":1,"kind":"topic_`: "damaged",
		``:                      "damaged",
	} {
		_, err := decodeEvent([]byte(text))
		if !errors.As(err, new(*FormatError)) || !strings.Contains(err.Error(), part) {
			t.Errorf("%s: %v, want %q", text, err, part)
		}
	}
}

// A field that a later release has added, and that may be overlooked, is.
func TestUnknownFieldsAreLeftOut(t *testing.T) {
	for text, want := range map[string]catalog.Event{
		`{"v":1,"kind":"topic_moved","by":"me","data":{"topic":"t","speed":3}}`:      catalog.TopicMoved{Topic: "t"},
		`{"v":2,"kind":"broker_left","data":{"broker":"b1","left":[],"of":{"x":1}}}`: catalog.BrokerLeft{ID: "b1"},
	} {
		if e, err := decodeEvent([]byte(text)); err != nil || !reflect.DeepEqual(e, want) {
			t.Errorf("%s: %+v, %v", text, e, err)
		}
	}
	_, err := decodeDump([]byte(`{"v":2,"kind":"snapshot","data":{"version":3,"colour":"red","brokers":[{"id":"b1","mcap":3,"shoe":9}]}}`), nil)
	testkit.NoError(t, err)
}

// 0.1.0 refuses what it does not know: a field or kind that it has not makes a record
// one of a later version, which it refuses as such, and no other does.
func TestWhat010CanRead(t *testing.T) {
	text := testkit.Result(os.ReadFile(filepath.Join("testdata", "v1.fields"))).Must(t)
	known := map[string]bool{}
	for _, line := range strings.Fields(string(text)) {
		known[line] = true
	}
	for kinds, i := kind("restarted").ContainingMessage().Fields(), 0; i < kinds.Len(); i++ {
		if k := kinds.Get(i); known["kind:"+string(k.Name())] != (since(k) == 1) || since(k) > Version {
			t.Errorf("kind %s: known to 0.1.0: %v, since version %d", k.Name(), known["kind:"+string(k.Name())], since(k))
		}
	}
	messages := journal.File_srtm_journal_journal_proto.Messages()
	for i := range messages.Len() {
		of := messages.Get(i)
		for j := 0; j < of.Fields().Len() && of.Name() != "Record"; j++ {
			f := of.Fields().Get(j)
			if at := strings.ToLower(string(of.Name())) + "." + string(f.Name()); known[at] != (since(f) == 1) || since(f) > Version {
				t.Errorf("%s: known to 0.1.0: %v, since version %d", at, known[at], since(f))
			}
		}
	}
	for want, m := range map[int]proto.Message{
		1: &journal.Snapshot{Brokers: []*journal.Broker{{Mcap: 1}}, Version: 3},
		2: &journal.Snapshot{Brokers: []*journal.Broker{{Mcap: 1}, {Forced: true}}},
	} {
		testkit.Equal(t, version(m.ProtoReflect()), want, "%v is of version", m)
	}
}

// Whatever is on disk: an error or an event that is written down again to what
// is read as the same.
func FuzzRecord(f *testing.F) {
	b, err := os.ReadFile(filepath.Join("testdata", "v1.jsonl"))
	testkit.Must(f, err)
	for line := range bytes.SplitSeq(bytes.TrimSpace(b), []byte("\n")) {
		f.Add(line)
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
		if d, err := decodeDump(b, nil); err == nil {
			if _, err := catalog.Load(d); err != nil {
				return
			}
			again, _, err := encodeDump(d)
			testkit.Must(t, err)
			if d2, err := decodeDump(again, nil); err != nil || len(d2.Topics) != len(d.Topics) || d2.Version != d.Version {
				t.Fatalf("%+v became %+v, %v", d, d2, err)
			}
		}
	})
}

// small reports whether no group of the record is expanded to many publishers.
func small(b []byte) bool {
	var v any
	if json.Unmarshal(b, &v) != nil {
		return true
	}
	var count func(any) float64
	count = func(v any) float64 {
		n := 0.0
		switch v := v.(type) {
		case map[string]any:
			for key, one := range v {
				if f, ok := one.(float64); ok && strings.EqualFold(key, "count") {
					n += f
				}
				n += count(one)
			}
		case []any:
			for _, one := range v {
				n += count(one)
			}
		}
		return n
	}
	return count(v) < 10_000
}

func TestTheTenantIsKept(t *testing.T) {
	want := &catalog.Spec{Demand: placement.Demand{Topic: "t", Rate: 1, RateMilli: 1000, Burst: 1, Groups: []placement.Group{{Key: "g", Count: 1, Rate: 1}}}, Tenant: "acme"}
	if got, err := toSpec(fromSpec(want)); err != nil || !got.Equal(want) || got.Tenant != "acme" {
		t.Errorf("%+v, %v", got, err)
	}
}
