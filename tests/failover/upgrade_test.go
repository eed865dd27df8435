package failover

import (
	"encoding/json"
	"flag"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/proto"

	srtmv1 "github.com/srtm-io/srtm/api/srtm/v1"
	"github.com/srtm-io/srtm/internal/etcdtest"
	"github.com/srtm-io/srtm/internal/local"
	"github.com/srtm-io/srtm/internal/testkit"
	"github.com/srtm-io/srtm/internal/testkit/localtest"
)

// What 0.1.0 left on disk, and how to record it anew, is in testdata/0.1.0/README.md.
var (
	record010 = flag.Bool("record-0.1.0", false, "with SRTM_010_BIN: rewrite testdata/0.1.0 and the journals beside loaddistributor/store")
	data010   = filepath.Join("testdata", "0.1.0")
	etcd010   = filepath.Join("..", "..", "loaddistributor", "store", "testdata", "0.1.0-etcd.json")
)

// fleet is a cluster of two brokers whose processes are replaced one after the other,
// in their folders and at their addresses.
type fleet struct {
	*cluster
	brokerDirs []string
	published  int
	topics     []string
	spec       *srtmv1.TopicSpec // of topic t, as the cluster must have it
	all        *consumer         // of topic t; nil: there has been none yet
}

func newFleet(t *testing.T, controls int, flags ...string) *fleet {
	f := &fleet{cluster: &cluster{t: t}, brokerDirs: []string{t.TempDir(), t.TempDir()}}
	for range controls {
		f.add(flags...)
	}
	return f
}

// begin starts everything, as that release has it.
func (f *fleet) begin(r release) {
	f.t.Helper()
	f.release = r
	for i := range f.control {
		f.start(i)
	}
	f.brokers = make([]*local.Process, len(f.brokerDirs))
	for i := range f.brokers {
		f.startBroker(i)
	}
	f.connect(len(f.brokers))
}

func (f *fleet) startBroker(i int) {
	f.t.Helper()
	flags := []string{
		"--loaddistributor-address=" + strings.Join(f.grpc, ","), fmt.Sprintf("--broker-id=b%d", i+1), "--mcap=1000000", "--data-path=" + f.brokerDirs[i],
	}
	start := func() (*local.Process, error) { return local.NSQD(f.release.nsqd, f.brokerDirs[i], flags...) }
	if old := f.brokers[i]; old != nil {
		start = func() (*local.Process, error) {
			return local.NSQDAt(f.release.nsqd, f.brokerDirs[i], old.TCP, old.HTTP, flags...)
		}
	}
	d, err := start()
	f.brokers[i] = localtest.Watch(f.t, d, err)
}

// replaceControl stops a loaddistributor and starts that of a release in its place.
func (f *fleet) replaceControl(i int, r release) {
	f.t.Helper()
	f.stop(f.control[i])
	f.release = r
	f.start(i)
}

func (f *fleet) replaceBroker(i int, r release) {
	f.t.Helper()
	f.stop(f.brokers[i])
	f.release = r
	f.startBroker(i)
}

// works fails unless topic t is as it was and active with both its brokers, a topic
// can be created, and t takes five messages at each broker.
func (f *fleet) works(step string) {
	f.t.Helper()
	var last *srtmv1.Topic
	defer func() {
		if f.t.Failed() {
			f.t.Logf("%s: topic t was last: %v", step, last)
		}
	}()
	testkit.WaitFor(f.t, step+": topic t is active on two brokers", func() bool {
		last = f.topic("t")
		return last.GetState() == srtmv1.TopicState_TOPIC_STATE_ACTIVE && len(last.GetQuotas()) == 2
	})
	if !proto.Equal(last.Spec, f.spec) {
		f.t.Fatalf("%s: topic t is\n%v\nwas\n%v", step, last.Spec, f.spec)
	}
	name := fmt.Sprintf("n%d", len(f.topics))
	f.create(contract(name, 10, 10, 2))
	f.topics = append(f.topics, name)
	for _, b := range f.brokers {
		for range 5 {
			if text, code, err := localtest.Ask(http.MethodPost, "http://"+b.HTTP+"/pub?topic=t", string(body(0, f.published))); code != http.StatusOK {
				f.t.Fatalf("%s: published: %d %s %v", step, code, text, err)
			}
			f.published++
		}
	}
}

// ends fails unless all topics are there, and all messages come, each once.
func (f *fleet) ends() {
	f.t.Helper()
	for _, name := range f.topics {
		if f.topic(name) == nil {
			f.t.Errorf("topic %s is gone", name)
		}
	}
	all := f.all
	if all == nil {
		all = f.consume("t")
	}
	testkit.WaitFor(f.t, "all messages come", func() bool { return all.count() >= f.published })
	seen := map[uint32]bool{}
	for _, r := range all.receipts {
		seen[r.number] = true
	}
	if len(seen) != f.published || all.count() != f.published {
		f.t.Errorf("%d messages were published, %d came, %d different ones", f.published, all.count(), len(seen))
	}
}

func wide() *srtmv1.TopicSpec {
	spec := contract("t", 1000, 100, 10)
	spec.PlacementPolicy, spec.ShareRule = "loadbalance", "sqrt"
	spec.Contract.OverLimit = srtmv1.OverLimitPolicy_OVER_LIMIT_POLICY_DELAY
	spec.Publishers = []*srtmv1.Publisher{{Id: "alone", Rate: 3}}
	return spec
}

// The data of a cluster of 0.1.0 on bbolt, with messages on the disks of its brokers,
// is taken over as it is.
func TestDataOf010(t *testing.T) {
	f := newFleet(t, 1, "--store=bbolt")
	testkit.Must(t, os.CopyFS(f.dirs[0], os.DirFS(filepath.Join(data010, "loaddistributor"))))
	for i, dir := range f.brokerDirs {
		testkit.Must(t, os.CopyFS(dir, os.DirFS(filepath.Join(data010, fmt.Sprintf("b%d", i+1)))))
	}
	f.spec, f.published, f.topics = wide(), 10, []string{"n0"}
	f.begin(current(t))
	f.works("0.1.0's data")
	f.ends()
}

// From 0.1.0 to this release and back, one process after the other, each step with
// traffic, a new topic and all the old ones. It needs the binaries of 0.1.0 in the
// folder SRTM_010_BIN, which `make upgrade` builds where git has that commit; what is
// guaranteed of records alone, loaddistributor/store and TestDataOf010 test always.
func TestUpgradeAndRollback(t *testing.T) {
	dir := os.Getenv("SRTM_010_BIN")
	if dir == "" {
		t.Skip("SRTM_010_BIN is not set: make upgrade does it")
	}
	old := release{filepath.Join(dir, "nsqd"), filepath.Join(dir, "loaddistributor")}
	t.Run("bbolt", func(t *testing.T) {
		f := newFleet(t, 1, "--store=bbolt")
		f.upgradeAndRollBack(old, "")
	})
	t.Run("etcd", func(t *testing.T) {
		e := etcdtest.Start(t, etcdtest.Config{})
		f := newFleet(t, 2, "--store=etcd", "--etcd-endpoint="+e.URL, "--etcd-prefix=/r/")
		f.upgradeAndRollBack(old, e.URL)
	})
}

func (f *fleet) upgradeAndRollBack(old release, etcd string) {
	t := f.t
	t.Helper()
	now := current(t)
	f.begin(old)
	f.spec = wide()
	f.create(f.spec)
	f.works("0.1.0")
	if *record010 {
		f.record(etcd)
		return
	}
	for i := range f.control {
		f.replaceControl(i, now)
		f.works(fmt.Sprintf("loaddistributor %d is new", i))
	}
	f.replaceBroker(0, now)
	f.works("a broker is new, too")
	f.replaceBroker(1, now)
	f.works("all are new")
	f.spec.Contract.Burst = 200
	testkit.Result(ask(f.cluster, srtmv1.AdminServiceClient.UpdateTopic, &srtmv1.UpdateTopicRequest{Spec: f.spec})).Must(t)
	testkit.Result(ask(f.cluster, srtmv1.AdminServiceClient.DeleteTopic, &srtmv1.DeleteTopicRequest{Name: f.topics[0]})).Must(t)
	f.topics = f.topics[1:]
	// A broker's messages have no way back: they are taken first.
	f.all = f.consume("t")
	taken := func() bool { return f.all.count() >= f.published }
	testkit.WaitFor(t, "all messages come before the way back", taken)
	f.replaceBroker(0, old)
	f.works("a broker is old again")
	for i := range f.control {
		f.replaceControl(i, old)
		f.works(fmt.Sprintf("loaddistributor %d is old again", i))
	}
	testkit.WaitFor(t, "all messages come before the way back of the other broker", taken)
	f.replaceBroker(1, old)
	f.works("all are old again")
	f.replaceControl(0, now)
	f.works("and new again")
	f.ends()
}

// record keeps what the cluster has left.
func (f *fleet) record(etcd string) {
	t := f.t
	t.Helper()
	for i := range f.control {
		f.stop(f.control[i])
	}
	for _, b := range f.brokers {
		f.stop(b)
	}
	if etcd == "" {
		for from, to := range map[string]string{f.dirs[0]: "loaddistributor", f.brokerDirs[0]: "b1", f.brokerDirs[1]: "b2"} {
			testkit.Must(t, os.RemoveAll(filepath.Join(data010, to)))
			testkit.Must(t, os.CopyFS(filepath.Join(data010, to), os.DirFS(from)))
		}
		return
	}
	client := testkit.Result(clientv3.New(clientv3.Config{Endpoints: []string{etcd}})).Must(t)
	defer client.Close()
	r := testkit.Result(client.Get(t.Context(), "/r/", clientv3.WithPrefix())).Must(t)
	keys := map[string]string{}
	for _, kv := range r.Kvs {
		keys[string(kv.Key)] = string(kv.Value)
	}
	text := testkit.Result(json.MarshalIndent(keys, "", " ")).Must(t)
	testkit.Must(t, os.WriteFile(etcd010, append(text, '\n'), 0o644))
}
