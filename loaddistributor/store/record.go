package store

import (
	"errors"
	"fmt"
	"reflect"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/srtm-io/srtm/api/srtm/journal"
	"github.com/srtm-io/srtm/loaddistributor/catalog"
)

// Fields of a journal.Record that are not events.
const (
	kindSnapshot = "snapshot"
	kindTopic    = "topic"
)

// FormatError: a record is damaged, or this program does not know its kind or one of its
// fields.
type FormatError struct {
	Kind  string // field name in journal.Record; empty: unknown
	Cause error  // nil: the kind is not expected here
}

func (e *FormatError) Error() string {
	name := "a record of an unknown kind"
	if e.Kind != "" {
		name = fmt.Sprintf("record %q", e.Kind)
	}
	if e.Cause != nil {
		return fmt.Sprintf("%s cannot be read: it is damaged, or another release wrote it: %v", name, e.Cause)
	}
	return name + " does not belong here: another release wrote it"
}

func (e *FormatError) Unwrap() error { return e.Cause }

func kind(name string) protoreflect.FieldDescriptor {
	return (*journal.Record)(nil).ProtoReflect().Descriptor().Fields().ByName(protoreflect.Name(name))
}

// unknown reports whether m, or a message in m, has a field that this program does not
// know.
func unknown(m protoreflect.Message) (found bool) {
	if len(m.GetUnknown()) > 0 {
		return true
	}
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case f.Message() == nil || f.IsMap(): // maps have no messages
		case f.IsList():
			for i := range v.List().Len() {
				found = found || unknown(v.List().Get(i).Message())
			}
		default:
			found = unknown(v.Message())
		}
		return !found
	})
	return found
}

// encode encodes a record of a kind.
func encode(name string, m proto.Message) ([]byte, error) {
	record := &journal.Record{}
	record.ProtoReflect().Set(kind(name), protoreflect.ValueOfMessage(m.ProtoReflect()))
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(record)
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", name, err)
	}
	return b, nil
}

// decode decodes a record. Errors are *FormatErrors.
func decode(b []byte) (name string, m proto.Message, err error) {
	var record journal.Record
	if err := proto.Unmarshal(b, &record); err != nil {
		return "", nil, &FormatError{Cause: err}
	}
	r := record.ProtoReflect()
	f := r.WhichOneof(r.Descriptor().Oneofs().ByName("kind"))
	if f == nil {
		return "", nil, &FormatError{}
	}
	name = string(f.Name())
	if unknown(r) {
		return "", nil, &FormatError{name, errors.New("it has a field that this program does not know")}
	}
	return name, r.Get(f).Message().Interface(), nil
}

// decodeAs decodes a record of one kind, whose message is an M.
func decodeAs[M proto.Message](b []byte, want string) (m M, err error) {
	name, read, err := decode(b)
	if err == nil && name != want {
		err = &FormatError{Kind: name}
	}
	if err != nil {
		return m, err
	}
	return read.(M), nil
}

// plain maps each kind to its event, for events whose fields are fields of a
// journal.Event.
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
	"member_found":              catalog.MemberFound{},
	"member_retired":            catalog.MemberRetired{},
	"restarted":                 catalog.Restarted{},
}

// fields calls f with each field of an event and the journal.Event field of the same
// name. The event's ID is the journal's Broker.
func fields(event reflect.Value, data *journal.Event, f func(eventField, dataField reflect.Value)) {
	for i := range event.NumField() {
		name := event.Type().Field(i).Name
		if name == "ID" {
			name = "Broker"
		}
		f(event.Field(i), reflect.ValueOf(data).Elem().FieldByName(name))
	}
}

// encodeEvent encodes an event.
func encodeEvent(e catalog.Event) ([]byte, error) {
	switch e := e.(type) {
	case catalog.BrokerJoined:
		return encode("broker_joined", &journal.Broker{
			Id: e.ID, Instance: e.Instance, Tcp: e.TCPAddress, Http: e.HTTPAddress, Mqtt: e.MQTTAddress, Mqtts: e.MQTTSAddress,
			Hostname: e.Hostname, Version: e.Version, Mcap: e.Mcap, DataPath: e.Folder, Lock: e.Lock,
		})
	case catalog.BrokerAbsorbed:
		return encode("broker_absorbed", fromAbsorption(e.ID, e.Absorption))
	case catalog.SharesUnconfirmed:
		return encode("shares_unconfirmed", fromUnconfirmed(e))
	case catalog.TopicPlaced:
		return encode("topic_placed", &journal.Order{Spec: fromSpec(e.Spec), Plan: fromPlan(e.Plan), Key: e.Key})
	case catalog.TopicMoving:
		if change := e.Change(); change != nil {
			return encodeEvent(*change)
		}
		return encode("topic_moving", &journal.Order{Spec: fromSpec(e.Spec), Plan: fromPlan(e.Plan)})
	case catalog.TopicChanging:
		return encode("topic_changing", fromChange(e))
	case catalog.TopicRestored:
		return encode("topic_restored", fromTopic(e.TopicDump))
	case catalog.BrokerRestored:
		return encode("broker_restored", fromBroker(e.BrokerDump))
	case catalog.ChannelsCreated:
		return encode("channels_created", &journal.Channels{Topic: e.Topic, Channels: fromChannels(e.Channels)})
	case catalog.ChannelsSet:
		return encode("channels_set", &journal.Channels{Topic: e.Topic, Channels: fromChannels(e.Channels)})
	case catalog.ChannelsDeleted:
		return encode("channels_deleted", &journal.Channels{Topic: e.Topic, Channels: fromChannels(e.Channels)})
	}
	for name, event := range plain {
		if reflect.TypeOf(event) == reflect.TypeOf(e) {
			data := &journal.Event{}
			fields(reflect.ValueOf(e), data, func(eventField, dataField reflect.Value) { dataField.Set(eventField) })
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

// decodeEvent decodes a record of encodeEvent. The error is a *FormatError.
func decodeEvent(b []byte) (catalog.Event, error) {
	name, m, err := decode(b)
	if err == nil && (name == kindSnapshot || name == kindTopic) {
		err = &FormatError{Kind: name}
	}
	if err != nil {
		return nil, err
	}
	e, err := toEvent(name, m)
	if err != nil {
		return nil, &FormatError{name, err}
	}
	return e, nil
}

func toEvent(name string, m proto.Message) (catalog.Event, error) {
	switch m := m.(type) {
	case *journal.Event:
		e := reflect.New(reflect.TypeOf(plain[name])).Elem()
		fields(e, m, func(eventField, dataField reflect.Value) { eventField.Set(dataField) })
		return e.Interface().(catalog.Event), nil
	case *journal.Broker:
		if name == "broker_restored" {
			return catalog.BrokerRestored{BrokerDump: toBroker(m)}, nil
		}
		return catalog.BrokerJoined{
			ID: m.Id, Instance: m.Instance, TCPAddress: m.Tcp, HTTPAddress: m.Http, MQTTAddress: m.Mqtt, MQTTSAddress: m.Mqtts,
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
		case "channels_set":
			return catalog.ChannelsSet{Topic: m.Topic, Channels: channels}, nil
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

// EncodeTopic encodes one topic of a log. Brokers store the result.
func EncodeTopic(log uint64, t catalog.TopicDump) ([]byte, error) {
	return encode(kindTopic, &journal.Kept{Log: log, Topic: fromTopic(t)})
}

// DecodeTopic decodes a record of EncodeTopic. The error is a *FormatError.
func DecodeTopic(b []byte) (log uint64, t catalog.TopicDump, err error) {
	m, err := decodeAs[*journal.Kept](b, kindTopic)
	if err != nil {
		return 0, t, err
	}
	if t, err = toTopic(m.Topic); err != nil {
		return 0, t, &FormatError{kindTopic, err}
	}
	return m.Log, t, nil
}

// Export encodes a catalog as the JSON of a journal.Snapshot, for Import.
func Export(d catalog.Dump) ([]byte, error) {
	return protojson.MarshalOptions{Multiline: true}.Marshal(fromDump(d))
}

// Import decodes the JSON of Export. The error is a *FormatError.
func Import(text []byte) (d catalog.Dump, err error) {
	var s journal.Snapshot
	if err = protojson.Unmarshal(text, &s); err == nil {
		d, err = toDump(&s)
	}
	if err != nil {
		return catalog.Dump{}, &FormatError{kindSnapshot, err}
	}
	return d, nil
}

// encodeDump encodes a catalog.
func encodeDump(d catalog.Dump) ([]byte, error) { return encode(kindSnapshot, fromDump(d)) }

// decodeDump decodes a record of encodeDump. The error is a *FormatError.
func decodeDump(b []byte) (d catalog.Dump, err error) {
	s, err := decodeAs[*journal.Snapshot](b, kindSnapshot)
	if err != nil {
		return d, err
	}
	if d, err = toDump(s); err != nil {
		return catalog.Dump{}, &FormatError{kindSnapshot, err}
	}
	return d, nil
}

// load returns the catalog of a dump. If dump is nil, the catalog is empty.
func load(dump []byte) (*catalog.Catalog, error) {
	if dump == nil {
		return catalog.New(), nil
	}
	d, err := decodeDump(dump)
	if err == nil {
		var cat *catalog.Catalog
		if cat, err = catalog.Load(d); err == nil {
			return cat, nil
		}
	}
	return nil, fmt.Errorf("snapshot: %w", err)
}
