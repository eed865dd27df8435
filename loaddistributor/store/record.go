package store

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/srtm-io/srtm/api/srtm/journal"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
)

// Version is the highest of the records that this package reads and writes; it
// reads all before it, too. A record says the version that its reader has to
// know, and is written with the lowest that will do: so a release before this one
// reads what has nothing new in it, and refuses the rest by its version. The numbers
// of journal.proto say which version a field or a kind is of.
//
// What this program has no place for in a record of a version that it knows is
// left out. So a field that must not be overlooked, and a new kind, take a new Version.
const Version = 2

// A frame is what a record is written as, JSON:
//
//	{"v":1,"kind":"topic_removed","data":{"topic":"t","left":["b1"]}}
//
// kind is the name of a field of journal.Record, and data that field's message, with
// its fields' names and with numbers as numbers: the tags of the generated types. So
// 0.1.0, which had types of its own, reads it, and this program what 0.1.0 wrote; it
// would read neither protobuf's binary form nor protobuf's own JSON, which has large
// numbers in quotes. testdata has one of each kind.
type frame struct {
	V    int             `json:"v"`
	Kind string          `json:"kind"`
	Data json.RawMessage `json:"data"`
}

// Kinds of records that are not events.
const (
	kindSnapshot  = "snapshot"
	kindAdditions = "additions"
	kindTopic     = "topic"
)

// FormatError: a record is not of a kind or version that this program knows, or
// is damaged.
type FormatError struct {
	Kind    string
	Version int
	Cause   error // nil: the version or the kind is unknown
}

func (e *FormatError) Error() string {
	switch {
	case e.Cause != nil:
		return fmt.Sprintf("record %q is damaged: %v", e.Kind, e.Cause)
	case e.Version < 1 || e.Version > Version:
		return fmt.Sprintf("record %q has version %d, this program knows 1 to %d: it was written by another release", e.Kind, e.Version, Version)
	}
	return fmt.Sprintf("record %q is of no kind that this program knows: it was written by a later release", e.Kind)
}

func (e *FormatError) Unwrap() error { return e.Cause }

func kind(name string) protoreflect.FieldDescriptor {
	return (*journal.Record)(nil).ProtoReflect().Descriptor().Fields().ByName(protoreflect.Name(name))
}

// since is the version that a reader of the field must know.
func since(f protoreflect.FieldDescriptor) int { return int(f.Number())/100 + 1 }

// version is the lowest that a reader of m must know.
func version(m protoreflect.Message) int {
	minimum := 1
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		minimum = max(minimum, since(f))
		switch {
		case f.Message() == nil || f.IsMap(): // maps have no messages
		case f.IsList():
			for i := range v.List().Len() {
				minimum = max(minimum, version(v.List().Get(i).Message()))
			}
		default:
			minimum = max(minimum, version(v.Message()))
		}
		return true
	})
	return minimum
}

func encode(name string, m proto.Message) ([]byte, error) {
	data, err := json.Marshal(m)
	if err == nil {
		data, err = json.Marshal(frame{max(since(kind(name)), version(m.ProtoReflect())), name, data})
	}
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", name, err)
	}
	return data, nil
}

// decode reads a record of a kind that wanted takes; errors are *FormatErrors.
func decode(b []byte, wanted func(name string) bool) (name string, m proto.Message, err error) {
	var r frame
	if err := json.Unmarshal(b, &r); err != nil {
		return "", nil, &FormatError{r.Kind, r.V, err}
	}
	f := kind(r.Kind)
	if r.V < 1 || r.V > Version || f == nil || !wanted(r.Kind) {
		return "", nil, &FormatError{r.Kind, r.V, nil}
	}
	m = (&journal.Record{}).ProtoReflect().NewField(f).Message().Interface()
	if err := json.Unmarshal(r.Data, m); err != nil {
		return "", nil, &FormatError{r.Kind, r.V, err}
	}
	return r.Kind, m, nil
}

// decodeAs reads a record of one kind, whose message is an M.
func decodeAs[M proto.Message](b []byte, want string) (m M, err error) {
	_, read, err := decode(b, func(name string) bool { return name == want })
	if err != nil {
		return m, err
	}
	return read.(M), nil
}

// plain has the events that are the fields of a journal.Event, by kind.
var plain = map[string]catalog.Event{
	"broker_left":               catalog.BrokerLeft{},
	"broker_draining":           catalog.BrokerDraining{},
	"broker_calibrated":         catalog.BrokerCalibrated{},
	"broker_noted":              catalog.BrokerNoted{},
	"broker_removed":            catalog.BrokerRemoved{},
	"member_prepared":           catalog.MemberPrepared{},
	"topic_activated":           catalog.TopicActivated{},
	"slo_judged":                catalog.SLOJudged{},
	"topic_deleting":            catalog.TopicDeleting{},
	"topic_removed":             catalog.TopicRemoved{},
	"leftover_removed":          catalog.LeftoverRemoved{},
	"leftover_contract_removed": catalog.LeftoverContractRemoved{},
	"topic_moved":               catalog.TopicMoved{},
	"topic_move_aborted":        catalog.TopicMoveAborted{},
	"member_retired":            catalog.MemberRetired{},
	"restarted":                 catalog.Restarted{},
}

// fields calls f with each field of an event and the one of a journal.Event that has
// its name; an event's ID is a broker's.
func fields(event reflect.Value, data *journal.Event, f func(of, in reflect.Value)) {
	for i := range event.NumField() {
		name := event.Type().Field(i).Name
		if name == "ID" {
			name = "Broker"
		}
		f(event.Field(i), reflect.ValueOf(data).Elem().FieldByName(name))
	}
}

// encodeEvent writes an event down.
func encodeEvent(e catalog.Event) ([]byte, error) {
	switch e := e.(type) {
	case catalog.BrokerJoined:
		return encode("broker_joined", &journal.Broker{
			Id: e.ID, Instance: e.Instance, Tcp: e.TCPAddress, Http: e.HTTPAddress,
			Hostname: e.Hostname, Version: e.Version, Mcap: e.Mcap, DataPath: e.Folder, Lock: e.Lock,
		})
	case catalog.BrokerAbsorbed:
		return encode("broker_absorbed", fromAbsorption(e.ID, e.Absorption))
	case catalog.SharesUnconfirmed:
		return encode("shares_unconfirmed", fromUnconfirmed(e))
	case catalog.TopicPlaced:
		return encode("topic_placed", &journal.Order{Spec: fromSpec(e.Spec), Plan: fromPlan(e.Plan, e.Spec), Key: e.Key})
	case catalog.TopicMoving:
		if change := e.Change(); change != nil {
			return encodeEvent(*change)
		}
		return encode("topic_moving", &journal.Order{Spec: fromSpec(e.Spec), Plan: fromPlan(e.Plan, e.Spec)})
	case catalog.TopicChanging:
		return encode("topic_changing", fromChange(e))
	case catalog.TopicRestored:
		return encode("topic_restored", fromTopic(e.TopicDump))
	case catalog.BrokerRestored:
		return encode("broker_restored", fromBroker(e.BrokerDump))
	case catalog.ChannelsCreated:
		return encode("channels_created", &journal.Channels{Topic: e.Topic, Channels: fromChannels(e.Channels)})
	case catalog.ChannelsPaused:
		return encode("channels_paused", &journal.Channels{Topic: e.Topic, Channels: fromChannels(e.Channels)})
	case catalog.ChannelsDeleted:
		return encode("channels_deleted", &journal.Channels{Topic: e.Topic, Channels: fromChannels(e.Channels)})
	}
	for name, like := range plain {
		if reflect.TypeOf(like) == reflect.TypeOf(e) {
			data := &journal.Event{}
			fields(reflect.ValueOf(e), data, func(of, in reflect.Value) { in.Set(of) })
			return encode(name, data)
		}
	}
	return nil, fmt.Errorf("encode event of type %T: there is no record for it", e)
}

func encodeEvents(events []catalog.Event) ([][]byte, error) {
	records := make([][]byte, len(events))
	for i, e := range events {
		var err error
		if records[i], err = encodeEvent(e); err != nil {
			return nil, err
		}
	}
	return records, nil
}

// decodeEvent reads what encodeEvent wrote; the error is a *FormatError.
func decodeEvent(b []byte) (catalog.Event, error) {
	name, m, err := decode(b, func(name string) bool {
		return !slices.Contains([]string{kindSnapshot, kindAdditions, kindTopic}, name)
	})
	if err != nil {
		return nil, err
	}
	e, err := toEvent(name, m)
	if err != nil {
		return nil, &FormatError{name, Version, err}
	}
	return e, nil
}

func toEvent(name string, m proto.Message) (catalog.Event, error) {
	switch m := m.(type) {
	case *journal.Event:
		e := reflect.New(reflect.TypeOf(plain[name])).Elem()
		fields(e, m, func(of, in reflect.Value) { of.Set(in) })
		return e.Interface().(catalog.Event), nil
	case *journal.Broker:
		if name == "broker_restored" {
			return catalog.BrokerRestored{BrokerDump: toBroker(m)}, nil
		}
		return catalog.BrokerJoined{
			ID: m.Id, Instance: m.Instance, TCPAddress: m.Tcp, HTTPAddress: m.Http,
			Hostname: m.Hostname, Version: m.Version, Mcap: m.Mcap, Folder: m.DataPath, Lock: m.Lock,
		}, nil
	case *journal.Absorbed:
		return catalog.BrokerAbsorbed{ID: m.Broker, Absorption: toAbsorption(m)}, nil
	case *journal.Unconfirmed:
		return toUnconfirmed(m), nil
	case *journal.Topic:
		d, err := toTopic(m)
		return catalog.TopicRestored{TopicDump: d}, err
	case *journal.Change:
		return toChange(m)
	case *journal.Channels:
		switch channels := toChannels(m.Channels); name {
		case "channels_paused":
			return catalog.ChannelsPaused{Topic: m.Topic, Channels: channels}, nil
		case "channels_deleted":
			return catalog.ChannelsDeleted{Topic: m.Topic, Channels: channels}, nil
		default:
			return catalog.ChannelsCreated{Topic: m.Topic, Channels: channels}, nil
		}
	case *journal.Order:
		s, err := toSpec(m.Spec)
		if err != nil {
			return nil, err
		}
		if name == "topic_moving" {
			return catalog.NewTopicMoving(s, toPlan(m.Plan))
		}
		return catalog.NewTopicPlaced(s, toPlan(m.Plan), m.Key)
	}
	panic(fmt.Sprintf("store: record %q with a %T", name, m))
}

// EncodeTopic writes one topic of a log down, to be kept elsewhere.
func EncodeTopic(log uint64, t catalog.TopicDump) ([]byte, error) {
	return encode(kindTopic, &journal.Kept{Log: log, Created: t.Created, Topic: fromTopic(t)})
}

// DecodeTopic reads what EncodeTopic wrote; the error is a *FormatError.
func DecodeTopic(b []byte) (log uint64, t catalog.TopicDump, err error) {
	m, err := decodeAs[*journal.Kept](b, kindTopic)
	if err != nil {
		return 0, t, err
	}
	if t, err = toTopic(m.Topic); err != nil {
		return 0, t, &FormatError{kindTopic, Version, err}
	}
	t.Created = m.Created
	return m.Log, t, nil
}

// Export writes a catalog down as text, for Import of this release or a later one.
func Export(d catalog.Dump) ([]byte, error) {
	dump, added, err := encodeDump(d)
	return slices.Concat(dump, []byte("\n"), added, []byte("\n")), err
}

// Import reads what Export wrote; the error is a *FormatError.
func Import(text []byte) (catalog.Dump, error) {
	dump, rest, _ := bytes.Cut(text, []byte("\n"))
	added, rest, whole := bytes.Cut(rest, []byte("\n"))
	if !whole || len(rest) > 0 {
		return catalog.Dump{}, &FormatError{kindSnapshot, Version, errors.New("two lines are wanted: it is cut off, or no export")}
	}
	return decodeDump(dump, added)
}

// encodeDump writes a catalog down, in two parts.
func encodeDump(d catalog.Dump) (dump, added []byte, err error) {
	s, more := fromDump(d)
	if dump, err = encode(kindSnapshot, s); err == nil {
		added, err = encode(kindAdditions, more)
	}
	return dump, added, err
}

// load returns the catalog that a dump is of; nil: an empty one.
func load(dump, added []byte) (*catalog.Catalog, error) {
	if dump == nil {
		return catalog.New(), nil
	}
	d, err := decodeDump(dump, added)
	if err == nil {
		var cat *catalog.Catalog
		if cat, err = catalog.Load(d); err == nil {
			return cat, nil
		}
	}
	return nil, fmt.Errorf("snapshot: %w", err)
}

// decodeDump reads what encodeDump wrote; added may be nil.
func decodeDump(b, added []byte) (d catalog.Dump, err error) {
	s, err := decodeAs[*journal.Snapshot](b, kindSnapshot)
	if err != nil {
		return d, err
	}
	more := &journal.Additions{}
	if added != nil {
		if more, err = decodeAs[*journal.Additions](added, kindAdditions); err != nil {
			return d, err
		}
	}
	if d, err = toDump(s, more); err != nil {
		return catalog.Dump{}, &FormatError{kindSnapshot, Version, err}
	}
	return d, nil
}
