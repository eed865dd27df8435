package store

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"time"

	"github.com/srtm-io/srtm/loaddistributor/catalog"
	"github.com/srtm-io/srtm/loaddistributor/placement"
	"github.com/srtm-io/srtm/tokenbucket"
)

// Version is the greatest of the records that this package reads and writes; it
// reads all before it, too. A record says the version that whoever reads it has to
// know, and is written with the least that will do: so a release before this one
// reads what has nothing new in it, and refuses the rest by its version.
//
// What this program has no place for in a record of a version that it knows is
// left out. So a field that a reader may overlook, since its zero value means what
// its absence meant, is added as it is; one that must not be overlooked, and a new
// kind, take a new Version: the field with the tag `since:"3"`, the kind in
// kindSince.
//
// Version 1 is of 0.1.0, which takes any field that it does not know for damage:
// every field that 0.1.0 has not is tagged since:"2" at least (testdata/v1.fields).
const Version = 2

// kindSince has the kinds that not every version knows.
var kindSince = map[string]int{
	kindAdditions: 2, kindTopic: 2, kindTopicRestored: 2, kindBrokerRestored: 2, kindBrokerNoted: 2, kindBrokerRemoved: 2,
}

// A record is JSON:
//
//	{"v":1,"kind":"topic_removed","data":{"topic":"t","left":["b1"]}}
//
// It has types of its own, so that no renaming elsewhere changes what is on
// disk. testdata has one of each kind.
type record struct {
	V    int             `json:"v"`
	Kind string          `json:"kind"`
	Data json.RawMessage `json:"data"`
}

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

// Kinds of record.
const (
	kindBrokerJoined     = "broker_joined"
	kindBrokerLeft       = "broker_left"
	kindBrokerDraining   = "broker_draining"
	kindBrokerCalibrated = "broker_calibrated"
	kindBrokerAbsorbed   = "broker_absorbed"
	kindBrokerNoted      = "broker_noted"
	kindBrokerRemoved    = "broker_removed"
	kindTopicPlaced      = "topic_placed"
	kindMemberPrepared   = "member_prepared"
	kindTopicActivated   = "topic_activated"
	kindSLOJudged        = "slo_judged"
	kindTopicDeleting    = "topic_deleting"
	kindTopicRemoved     = "topic_removed"
	kindLeftoverRemoved  = "leftover_removed"
	kindContractRemoved  = "leftover_contract_removed"
	kindTopicMoving      = "topic_moving"
	kindTopicMoved       = "topic_moved"
	kindTopicMoveAborted = "topic_move_aborted"
	kindMemberRetired    = "member_retired"
	kindRestarted        = "restarted"
	kindSnapshot         = "snapshot"
	kindAdditions        = "additions"
	kindTopic            = "topic"
	kindTopicRestored    = "topic_restored"
	kindBrokerRestored   = "broker_restored"
)

// event is the data of every kind that names things and orders nothing.
type event struct {
	Topic        string   `json:"topic,omitempty"`
	Broker       string   `json:"broker,omitempty"`
	Missed       string   `json:"missed,omitempty"`
	Left         []string `json:"left,omitempty"`
	ContractLeft bool     `json:"contract_left,omitempty"`
	Draining     bool     `json:"draining,omitempty"`
	Forced       bool     `json:"forced,omitempty" since:"2"`
	Mcap         int64    `json:"mcap,omitempty"` // msg/s
	Forgotten    bool     `json:"forgotten,omitempty" since:"2"`
	Strict       bool     `json:"strict,omitempty" since:"2"`
}

type broker struct {
	ID        string   `json:"id"`
	Instance  string   `json:"instance,omitempty"`
	TCP       string   `json:"tcp,omitempty"`
	HTTP      string   `json:"http,omitempty"`
	Hostname  string   `json:"hostname,omitempty"`
	Version   string   `json:"version,omitempty"`
	Mcap      int64    `json:"mcap"` // msg/s, as the broker says
	Connected bool     `json:"connected,omitempty"`
	Draining  bool     `json:"draining,omitempty"`
	Forced    bool     `json:"forced,omitempty" since:"2"`
	Leftovers []string `json:"leftovers,omitempty"`
	LeftAt    uint64   `json:"left_at,omitempty"`
	// What stands over mcap, msg/s; absent: nothing.
	Calibrated int64     `json:"calibrated,omitempty"`
	Absorbed   *absorbed `json:"absorbed,omitempty"`
}

type absorbed struct {
	Broker    string `json:"broker,omitempty"` // absent in a snapshot
	LatencyNS int64  `json:"latency_ns"`
	RateMilli int64  `json:"rate_milli"`
	Burst     int64  `json:"burst"`
}

func fromAbsorption(broker string, a catalog.Absorption) *absorbed {
	if a == (catalog.Absorption{}) {
		return nil
	}
	return &absorbed{broker, int64(a.Latency), a.Rate, a.Burst}
}

func (a *absorbed) absorption() catalog.Absorption {
	if a == nil {
		return catalog.Absorption{}
	}
	return catalog.Absorption{Latency: time.Duration(a.LatencyNS), Rate: a.RateMilli, Burst: a.Burst}
}

type order struct {
	Spec *spec  `json:"spec"`
	Plan plan   `json:"plan"`
	Key  string `json:"key,omitempty"`
}

type spec struct {
	Name       string      `json:"name"`
	RateMilli  int64       `json:"rate_milli"`
	Rate       int64       `json:"rate"` // msg/s
	Burst      int64       `json:"burst"`
	Publishers []publisher `json:"publishers,omitempty"`
	Groups     []group     `json:"groups,omitempty"`
	Quantile   float64     `json:"quantile"`
	LatencyNS  int64       `json:"latency_ns"`
	Reject     bool        `json:"reject,omitempty"`
	Policy     string      `json:"policy"`
	ShareRule  string      `json:"share_rule"`
	Channels   []string    `json:"channels,omitempty"`
}

type publisher struct {
	ID    string  `json:"id"`
	Key   string  `json:"key,omitempty"`
	Rate  float64 `json:"rate"`
	Batch int     `json:"batch,omitempty"`
}

type group struct {
	Key   string  `json:"key,omitempty"`
	Count int     `json:"count"`
	Rate  float64 `json:"rate"`
	Batch int     `json:"batch,omitempty"`
}

type plan struct {
	Policy string  `json:"policy"`
	Quotas []quota `json:"quotas"`
	// Publishers without a broker, as in a quota.
	Unplaced []int `json:"unplaced,omitempty"`
}

type quota struct {
	Broker string `json:"broker"`
	Rate   int64  `json:"rate"` // msg/s
	// Indices of publishers, ascending: the first, then the differences, which
	// are small.
	Publishers []int          `json:"publishers,omitempty"`
	Groups     map[string]int `json:"groups,omitempty"`
	RateMilli  int64          `json:"rate_milli"`
	Burst      int64          `json:"burst"`
}

type snapshot struct {
	Version   uint64   `json:"version"`
	Brokers   []broker `json:"brokers,omitempty"`
	Topics    []topic  `json:"topics,omitempty"`
	Contracts []string `json:"contracts,omitempty"`
}

// additions are of a snapshot what 0.1.0 does not know. They stand beside it, so that
// 0.1.0 reads it; those that are not of its version are left from an earlier one, before
// 0.1.0 replaced the snapshot alone.
type additions struct {
	Version uint64            `json:"version"`
	Log     uint64            `json:"log"`
	Ahead   uint64            `json:"ahead,omitempty"`   // of epochs
	Created map[string]uint64 `json:"created,omitempty"` // by topic
	// Brokers: as BrokerNoted says, and with the version at which they were removed.
	Forgotten []string          `json:"forgotten,omitempty"`
	Strict    []string          `json:"strict,omitempty"`
	Removed   map[string]uint64 `json:"removed,omitempty"`
}

// kept is a topic that is kept elsewhere.
type kept struct {
	Log     uint64 `json:"log"`
	Created uint64 `json:"created,omitempty"`
	Topic   topic  `json:"topic"`
}

type topic struct {
	Spec         *spec    `json:"spec"`
	Ordered      *spec    `json:"ordered,omitempty"` // absent: spec
	Key          string   `json:"key,omitempty"`
	Phase        string   `json:"phase"`
	Plan         plan     `json:"plan"`
	Epoch        uint64   `json:"epoch"`
	Prepared     []bool   `json:"prepared"`
	NextSpec     *spec    `json:"next_spec,omitempty"` // absent: it does not move
	NextPlan     *plan    `json:"next_plan,omitempty"`
	NextPrepared []bool   `json:"next_prepared,omitempty"`
	Retiring     []string `json:"retiring,omitempty"`
}

func encode(kind string, data any) ([]byte, error) {
	b, err := json.Marshal(data)
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", kind, err)
	}
	b, err = json.Marshal(record{V: max(1, kindSince[kind], since(reflect.ValueOf(data))), Kind: kind, Data: b})
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", kind, err)
	}
	return b, nil
}

// since is the version that the fields of v need which are not zero; 0: any.
func since(v reflect.Value) (version int) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			return since(v.Elem())
		}
	case reflect.Slice:
		if e := v.Type().Elem().Kind(); e == reflect.Struct || e == reflect.Pointer {
			for i := range v.Len() {
				version = max(version, since(v.Index(i)))
			}
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Field(i).IsZero() {
				continue
			}
			of, _ := strconv.Atoi(v.Type().Field(i).Tag.Get("since"))
			version = max(version, of, since(v.Field(i)))
		}
	}
	return version
}

// encodeEvent writes an event down.
func encodeEvent(e catalog.Event) ([]byte, error) {
	switch e := e.(type) {
	case catalog.BrokerJoined:
		return encode(kindBrokerJoined, broker{
			ID: e.ID, Instance: e.Instance, TCP: e.TCPAddress, HTTP: e.HTTPAddress,
			Hostname: e.Hostname, Version: e.Version, Mcap: e.Mcap,
		})
	case catalog.BrokerLeft:
		return encode(kindBrokerLeft, event{Broker: e.ID})
	case catalog.BrokerDraining:
		return encode(kindBrokerDraining, event{Broker: e.ID, Draining: e.Draining, Forced: e.Forced})
	case catalog.BrokerCalibrated:
		return encode(kindBrokerCalibrated, event{Broker: e.ID, Mcap: e.Mcap})
	case catalog.BrokerAbsorbed:
		return encode(kindBrokerAbsorbed, fromAbsorption(e.ID, e.Absorption))
	case catalog.BrokerNoted:
		return encode(kindBrokerNoted, event{Broker: e.ID, Forgotten: e.Forgotten, Strict: e.Strict})
	case catalog.BrokerRemoved:
		return encode(kindBrokerRemoved, event{Broker: e.ID})
	case catalog.TopicPlaced:
		return encode(kindTopicPlaced, order{Spec: fromSpec(e.Spec), Plan: fromPlan(e.Plan), Key: e.Key})
	case catalog.MemberPrepared:
		return encode(kindMemberPrepared, event{Topic: e.Topic, Broker: e.Broker})
	case catalog.TopicActivated:
		return encode(kindTopicActivated, event{Topic: e.Topic})
	case catalog.SLOJudged:
		return encode(kindSLOJudged, event{Topic: e.Topic, Missed: e.Missed})
	case catalog.TopicDeleting:
		return encode(kindTopicDeleting, event{Topic: e.Topic})
	case catalog.TopicRemoved:
		return encode(kindTopicRemoved, event{Topic: e.Topic, Left: e.Left, ContractLeft: e.ContractLeft})
	case catalog.LeftoverRemoved:
		return encode(kindLeftoverRemoved, event{Topic: e.Topic, Broker: e.Broker})
	case catalog.LeftoverContractRemoved:
		return encode(kindContractRemoved, event{Topic: e.Topic})
	case catalog.TopicMoving:
		return encode(kindTopicMoving, order{Spec: fromSpec(e.Spec), Plan: fromPlan(e.Plan)})
	case catalog.TopicMoved:
		return encode(kindTopicMoved, event{Topic: e.Topic})
	case catalog.TopicMoveAborted:
		return encode(kindTopicMoveAborted, event{Topic: e.Topic, Left: e.Left})
	case catalog.MemberRetired:
		return encode(kindMemberRetired, event{Topic: e.Topic, Broker: e.Broker})
	case catalog.TopicRestored:
		return encode(kindTopicRestored, fromTopic(e.TopicDump))
	case catalog.BrokerRestored:
		return encode(kindBrokerRestored, fromBroker(e.BrokerDump))
	case catalog.Restarted:
		return encode(kindRestarted, struct{}{})
	}
	return nil, fmt.Errorf("encode event of type %T: there is no record for it", e)
}

// open reads a record's frame.
func open(b []byte) (record, error) {
	var r record
	if err := json.Unmarshal(b, &r); err != nil {
		return record{}, &FormatError{Kind: r.Kind, Version: r.V, Cause: err}
	}
	if r.V < 1 || r.V > Version {
		return record{}, &FormatError{Kind: r.Kind, Version: r.V}
	}
	return r, nil
}

// decodeEvent reads what encodeEvent wrote; the error is a *FormatError.
func decodeEvent(b []byte) (catalog.Event, error) {
	r, err := open(b)
	if err != nil {
		return nil, err
	}
	e, err := r.event()
	switch {
	case err != nil:
		return nil, &FormatError{Kind: r.Kind, Version: r.V, Cause: err}
	case e == nil:
		return nil, &FormatError{Kind: r.Kind, Version: r.V}
	}
	return e, nil
}

// event returns nil for a kind that is not an event's.
func (r record) event() (catalog.Event, error) {
	var e event
	switch r.Kind {
	case kindBrokerJoined:
		var b broker
		if err := json.Unmarshal(r.Data, &b); err != nil {
			return nil, err
		}
		return catalog.BrokerJoined{
			ID: b.ID, Instance: b.Instance, TCPAddress: b.TCP, HTTPAddress: b.HTTP,
			Hostname: b.Hostname, Version: b.Version, Mcap: b.Mcap,
		}, nil
	case kindTopicRestored:
		var t topic
		if err := json.Unmarshal(r.Data, &t); err != nil {
			return nil, err
		}
		d, err := t.dump()
		return catalog.TopicRestored{TopicDump: d}, err
	case kindBrokerRestored:
		var b broker
		if err := json.Unmarshal(r.Data, &b); err != nil {
			return nil, err
		}
		return catalog.BrokerRestored{BrokerDump: b.dump()}, nil
	case kindBrokerAbsorbed:
		var a absorbed
		if err := json.Unmarshal(r.Data, &a); err != nil {
			return nil, err
		}
		return catalog.BrokerAbsorbed{ID: a.Broker, Absorption: a.absorption()}, nil
	case kindTopicPlaced, kindTopicMoving:
		var o order
		if err := json.Unmarshal(r.Data, &o); err != nil {
			return nil, err
		}
		s, err := o.Spec.spec()
		if err != nil {
			return nil, err
		}
		if r.Kind == kindTopicMoving {
			return catalog.NewTopicMoving(s, o.Plan.plan())
		}
		return catalog.NewTopicPlaced(s, o.Plan.plan(), o.Key)
	}
	if err := json.Unmarshal(r.Data, &e); err != nil {
		return nil, err
	}
	switch r.Kind {
	case kindBrokerLeft:
		return catalog.BrokerLeft{ID: e.Broker}, nil
	case kindBrokerDraining:
		return catalog.BrokerDraining{ID: e.Broker, Draining: e.Draining, Forced: e.Forced}, nil
	case kindBrokerCalibrated:
		return catalog.BrokerCalibrated{ID: e.Broker, Mcap: e.Mcap}, nil
	case kindBrokerNoted:
		return catalog.BrokerNoted{ID: e.Broker, Forgotten: e.Forgotten, Strict: e.Strict}, nil
	case kindBrokerRemoved:
		return catalog.BrokerRemoved{ID: e.Broker}, nil
	case kindMemberPrepared:
		return catalog.MemberPrepared{Topic: e.Topic, Broker: e.Broker}, nil
	case kindTopicActivated:
		return catalog.TopicActivated{Topic: e.Topic}, nil
	case kindSLOJudged:
		return catalog.SLOJudged{Topic: e.Topic, Missed: e.Missed}, nil
	case kindTopicDeleting:
		return catalog.TopicDeleting{Topic: e.Topic}, nil
	case kindTopicRemoved:
		return catalog.TopicRemoved{Topic: e.Topic, Left: e.Left, ContractLeft: e.ContractLeft}, nil
	case kindLeftoverRemoved:
		return catalog.LeftoverRemoved{Topic: e.Topic, Broker: e.Broker}, nil
	case kindContractRemoved:
		return catalog.LeftoverContractRemoved{Topic: e.Topic}, nil
	case kindTopicMoved:
		return catalog.TopicMoved{Topic: e.Topic}, nil
	case kindTopicMoveAborted:
		return catalog.TopicMoveAborted{Topic: e.Topic, Left: e.Left}, nil
	case kindMemberRetired:
		return catalog.MemberRetired{Topic: e.Topic, Broker: e.Broker}, nil
	case kindRestarted:
		return catalog.Restarted{}, nil
	}
	return nil, nil
}

var phases = map[catalog.State]string{catalog.Preparing: "preparing", catalog.Active: "active", catalog.Deleting: "deleting"}

// encodeDump writes a catalog down, in two parts.
func encodeDump(d catalog.Dump) (dump, added []byte, err error) {
	s := snapshot{Version: d.Version, Contracts: d.Contracts}
	more := additions{Version: d.Version, Log: d.Log, Ahead: d.Ahead, Created: map[string]uint64{}, Removed: d.Removed}
	for _, b := range d.Brokers {
		k := b.Broker
		if k.Forgotten {
			more.Forgotten = append(more.Forgotten, k.ID)
		}
		if k.Strict {
			more.Strict = append(more.Strict, k.ID)
		}
		s.Brokers = append(s.Brokers, fromBroker(b))
	}
	for _, t := range d.Topics {
		s.Topics = append(s.Topics, fromTopic(t))
		if t.Created > 0 {
			more.Created[t.Spec.Name()] = t.Created
		}
	}
	if dump, err = encode(kindSnapshot, s); err == nil {
		added, err = encode(kindAdditions, more)
	}
	return dump, added, err
}

func fromBroker(b catalog.BrokerDump) broker {
	k := b.Broker
	return broker{
		ID: k.ID, Instance: k.Instance, TCP: k.TCPAddress, HTTP: k.HTTPAddress, Hostname: k.Hostname,
		Version: k.Version, Mcap: k.Configured, Connected: k.Connected, Draining: k.Draining, Forced: k.Forced,
		Leftovers: b.Leftovers, LeftAt: b.LeftAt, Calibrated: k.Calibrated,
		Absorbed: fromAbsorption("", k.Absorbed),
	}
}

func fromTopic(t catalog.TopicDump) topic {
	one := topic{
		Spec: fromSpec(t.Spec), Key: t.Key, Phase: phases[t.Phase], Plan: fromPlan(t.Plan),
		Epoch: t.Epoch, Prepared: t.Prepared, Retiring: t.Retiring,
	}
	if t.Ordered != t.Spec {
		one.Ordered = fromSpec(t.Ordered)
	}
	if t.Next != nil {
		p := fromPlan(t.Next.Plan)
		one.NextSpec, one.NextPlan, one.NextPrepared = fromSpec(t.Next.Spec), &p, t.NextPrepared
	}
	return one
}

// EncodeTopic writes one topic of a log down, to be kept elsewhere.
func EncodeTopic(log uint64, t catalog.TopicDump) ([]byte, error) {
	return encode(kindTopic, kept{Log: log, Created: t.Created, Topic: fromTopic(t)})
}

// DecodeTopic reads what EncodeTopic wrote; the error is a *FormatError.
func DecodeTopic(b []byte) (log uint64, t catalog.TopicDump, err error) {
	var k kept
	if err := decode(b, kindTopic, &k); err != nil {
		return 0, t, err
	}
	if t, err = k.Topic.dump(); err != nil {
		return 0, t, &FormatError{Kind: kindTopic, Version: Version, Cause: err}
	}
	t.Created = k.Created
	return k.Log, t, nil
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
		return catalog.Dump{}, &FormatError{Kind: kindSnapshot, Version: Version, Cause: errors.New("two lines are wanted: it is cut off, or no export")}
	}
	return decodeDump(dump, added)
}

// decode reads a record of one kind.
func decode(b []byte, kind string, data any) error {
	r, err := open(b)
	switch {
	case err != nil:
		return err
	case r.Kind != kind:
		return &FormatError{Kind: r.Kind, Version: r.V}
	}
	if err := json.Unmarshal(r.Data, data); err != nil {
		return &FormatError{Kind: r.Kind, Version: r.V, Cause: err}
	}
	return nil
}

// decodeDump reads what encodeDump wrote; added may be nil.
func decodeDump(b, added []byte) (catalog.Dump, error) {
	var s snapshot
	if err := decode(b, kindSnapshot, &s); err != nil {
		return catalog.Dump{}, err
	}
	var more additions
	if added != nil {
		if err := decode(added, kindAdditions, &more); err != nil {
			return catalog.Dump{}, err
		}
		if more.Version != s.Version {
			more = additions{}
		}
	}
	d := catalog.Dump{Version: s.Version, Log: more.Log, Ahead: more.Ahead, Contracts: s.Contracts, Removed: map[string]uint64{}}
	maps.Copy(d.Removed, more.Removed)
	for _, b := range s.Brokers {
		one := b.dump()
		one.Broker.Forgotten, one.Broker.Strict = slices.Contains(more.Forgotten, b.ID), slices.Contains(more.Strict, b.ID)
		d.Brokers = append(d.Brokers, one)
	}
	for _, t := range s.Topics {
		one, err := t.dump()
		if err != nil {
			return catalog.Dump{}, &FormatError{Kind: kindSnapshot, Version: Version, Cause: err}
		}
		one.Created = more.Created[one.Spec.Name()]
		d.Topics = append(d.Topics, one)
	}
	return d, nil
}

func (b *broker) dump() catalog.BrokerDump {
	return catalog.BrokerDump{
		Broker: catalog.Broker{
			ID: b.ID, Instance: b.Instance, TCPAddress: b.TCP, HTTPAddress: b.HTTP, Hostname: b.Hostname,
			Version: b.Version, Connected: b.Connected, Draining: b.Draining, Forced: b.Forced,
			Mcap: cmp.Or(b.Calibrated, b.Mcap), Configured: b.Mcap, Calibrated: b.Calibrated,
			Absorbed: b.Absorbed.absorption(),
		},
		Leftovers: b.Leftovers, LeftAt: b.LeftAt,
	}
}

func (t *topic) dump() (catalog.TopicDump, error) {
	d := catalog.TopicDump{
		Key: t.Key, Plan: t.Plan.plan(), Epoch: t.Epoch, Prepared: t.Prepared, Retiring: t.Retiring,
	}
	for state, name := range phases {
		if name == t.Phase {
			d.Phase = state
		}
	}
	var err error
	if d.Spec, err = t.Spec.spec(); err != nil {
		return d, err
	}
	d.Ordered = d.Spec
	if t.Ordered != nil {
		if d.Ordered, err = t.Ordered.spec(); err != nil {
			return d, err
		}
	}
	if (t.NextSpec == nil) != (t.NextPlan == nil) {
		return d, fmt.Errorf("half of a next plan of topic %s", d.Spec.Name())
	}
	if t.NextSpec != nil {
		s, err := t.NextSpec.spec()
		if err != nil {
			return d, err
		}
		d.Next, d.NextPrepared = &catalog.Next{Spec: s, Plan: t.NextPlan.plan()}, t.NextPrepared
	}
	return d, nil
}

func fromSpec(s *catalog.Spec) *spec {
	p := &spec{
		Name: s.Demand.Topic, RateMilli: s.Demand.RateMilli, Rate: s.Demand.Rate, Burst: s.Demand.Burst,
		Quantile: s.SLO.Quantile, LatencyNS: int64(s.SLO.Latency), Reject: s.OverLimit == catalog.Reject,
		Policy: s.Policy, ShareRule: s.ShareRule, Channels: s.Channels,
	}
	for _, one := range s.Demand.Publishers {
		p.Publishers = append(p.Publishers, publisher(one))
	}
	for _, one := range s.Demand.Groups {
		p.Groups = append(p.Groups, group(one))
	}
	return p
}

// spec refuses what no request could have brought in: expanding it could take
// any amount of memory.
func (p *spec) spec() (*catalog.Spec, error) {
	if p == nil {
		return nil, fmt.Errorf("there is no specification")
	}
	s := &catalog.Spec{
		Demand: placement.Demand{Topic: p.Name, RateMilli: p.RateMilli, Rate: p.Rate, Burst: p.Burst},
		SLO:    catalog.SLO{Quantile: p.Quantile, Latency: time.Duration(p.LatencyNS)},
		Policy: p.Policy, ShareRule: p.ShareRule, Channels: p.Channels,
	}
	if p.Reject {
		s.OverLimit = catalog.Reject
	}
	for _, one := range p.Publishers {
		s.Demand.Publishers = append(s.Demand.Publishers, placement.Publisher(one))
	}
	for _, one := range p.Groups {
		s.Demand.Groups = append(s.Demand.Groups, placement.Group(one))
	}
	if err := s.Demand.Validate(); err != nil {
		return nil, fmt.Errorf("topic %q: %w", p.Name, err)
	}
	return s, nil
}

func fromPlan(p placement.Plan) plan {
	r := plan{Policy: p.Policy, Unplaced: differences(p.Unplaced)}
	for _, q := range p.Quotas {
		one := quota{
			Broker: q.Broker, Rate: q.Rate, Groups: q.Groups, RateMilli: int64(q.Share.Rate), Burst: q.Share.Burst,
		}
		one.Publishers = differences(q.Publishers)
		r.Quotas = append(r.Quotas, one)
	}
	return r
}

func (p *plan) plan() placement.Plan {
	r := placement.Plan{Policy: p.Policy, K: len(p.Quotas), Unplaced: sums(p.Unplaced)}
	for _, q := range p.Quotas {
		one := placement.Quota{
			Broker: q.Broker, Rate: q.Rate, Groups: q.Groups,
			Share: tokenbucket.Share{Rate: tokenbucket.Rate(q.RateMilli), Burst: q.Burst},
		}
		if one.Groups == nil {
			one.Groups = map[string]int{}
		}
		one.Publishers = sums(q.Publishers)
		r.Quotas = append(r.Quotas, one)
	}
	return r
}

// differences of ascending indices: the first, and then what each is more than the
// one before.
func differences(indices []int) (d []int) {
	last := 0
	for _, i := range indices {
		d = append(d, i-last)
		last = i
	}
	return d
}

// sums is the inverse of differences.
func sums(d []int) (indices []int) {
	last := 0
	for _, more := range d {
		last += more
		indices = append(indices, last)
	}
	return indices
}
