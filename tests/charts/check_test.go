package charts

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/compose-spec/compose-go/v2/loader"
	"github.com/compose-spec/compose-go/v2/types"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
	"helm.sh/helm/v3/pkg/chart"
	helm "helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	"sigs.k8s.io/yaml"
)

var deploy = filepath.Join("..", "..", "deploy")

func load(t *testing.T) *chart.Chart {
	t.Helper()
	c, err := helm.Load(filepath.Join(deploy, "helm", "srtm"))
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	return c
}

// render returns the objects by kind/name, and fails on a field that Kubernetes does not know.
func render(t *testing.T, values map[string]any) (map[string]any, error) {
	t.Helper()
	c := load(t)
	options := chartutil.ReleaseOptions{Name: "r", Namespace: "ns", IsInstall: true}
	all, err := chartutil.ToRenderValues(c, values, options, nil) // checks the schema, too
	if err != nil {
		return nil, err
	}
	files, err := engine.Render(c, all)
	if err != nil {
		return nil, err
	}
	objects := map[string]any{}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if !strings.HasSuffix(name, ".yaml") {
			continue
		}
		for _, text := range strings.Split(files[name], "\n---\n") {
			if strings.TrimSpace(text) == "" {
				continue
			}
			var head struct {
				Kind     string
				Metadata struct{ Name string }
			}
			if err := yaml.Unmarshal([]byte(text), &head); err != nil {
				t.Fatalf("%s: %v\n%s", name, err, text)
			}
			object := map[string]any{
				"Service": new(corev1.Service), "StatefulSet": new(appsv1.StatefulSet), "Deployment": new(appsv1.Deployment),
				"PodDisruptionBudget": new(policyv1.PodDisruptionBudget), "NetworkPolicy": new(networkingv1.NetworkPolicy),
				"PersistentVolumeClaim": new(corev1.PersistentVolumeClaim), "ConfigMap": new(corev1.ConfigMap),
			}[head.Kind]
			if object == nil {
				t.Fatalf("%s: an object of kind %q\n%s", name, head.Kind, text)
			}
			if err := yaml.UnmarshalStrict([]byte(text), object); err != nil {
				t.Errorf("%s: %v\n%s", name, err, text)
			}
			objects[head.Kind+"/"+head.Metadata.Name] = object
		}
	}
	return objects, nil
}

var etcd = map[string]any{"etcd": map[string]any{"endpoints": []any{"http://etcd:2379"}}}

func TestChart(t *testing.T) {
	objects, err := render(t, map[string]any{"loaddistributor": etcd})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"Deployment/r-loaddistributor", "NetworkPolicy/r-broker", "NetworkPolicy/r-loaddistributor", "PodDisruptionBudget/r-broker",
		"PodDisruptionBudget/r-loaddistributor", "Service/r-brokers", "Service/r-loaddistributor", "StatefulSet/r-broker",
	}
	if got := slices.Sorted(maps.Keys(objects)); !slices.Equal(got, want) {
		t.Fatalf("it has %q, want %q", got, want)
	}
	brokers := objects["StatefulSet/r-broker"].(*appsv1.StatefulSet)
	deployment := objects["Deployment/r-loaddistributor"].(*appsv1.Deployment)
	args := brokers.Spec.Template.Spec.Containers[0].Args
	if brokers.Spec.ServiceName != "r-brokers" || !slices.Contains(args, "--broker-id=$(POD_NAME)") || !slices.Contains(args, "--mcap=20000") {
		t.Errorf("brokers have no stable ids: service %q, %q", brokers.Spec.ServiceName, args)
	}
	if args := deployment.Spec.Template.Spec.Containers[0].Args; !slices.Contains(args, "--store=etcd") || !slices.Contains(args, "--etcd-endpoint=http://etcd:2379") {
		t.Errorf("loaddistributors: %q", args)
	}
	for name, pod := range map[string]corev1.PodTemplateSpec{"brokers": brokers.Spec.Template, "loaddistributors": deployment.Spec.Template} {
		c := pod.Spec.Containers[0]
		if s := c.SecurityContext; !*s.ReadOnlyRootFilesystem || *s.AllowPrivilegeEscalation || !slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) || len(s.Capabilities.Add) > 0 || !*pod.Spec.SecurityContext.RunAsNonRoot {
			t.Errorf("%s run with %+v in %+v", name, s, pod.Spec.SecurityContext)
		}
		if c.ReadinessProbe == nil || c.LivenessProbe == nil {
			t.Errorf("%s: no probes", name)
		}
	}
	// The selectors match the pods' labels.
	for name, pair := range map[string][2]map[string]string{
		"service":        {objects["Service/r-brokers"].(*corev1.Service).Spec.Selector, brokers.Spec.Template.Labels},
		"brokers":        {brokers.Spec.Selector.MatchLabels, brokers.Spec.Template.Labels},
		"budget":         {objects["PodDisruptionBudget/r-broker"].(*policyv1.PodDisruptionBudget).Spec.Selector.MatchLabels, brokers.Spec.Template.Labels},
		"network policy": {objects["NetworkPolicy/r-loaddistributor"].(*networkingv1.NetworkPolicy).Spec.PodSelector.MatchLabels, deployment.Spec.Template.Labels},
	} {
		for key, value := range pair[0] {
			if pair[1][key] != value || len(pair[0]) < 3 {
				t.Errorf("%s selects %v, pods have %v", name, pair[0], pair[1])
			}
		}
	}
}

func TestChartWithOtherValues(t *testing.T) {
	single, err := render(t, map[string]any{"loaddistributor": map[string]any{"replicas": 1}, "networkPolicy": map[string]any{"enabled": false}})
	if err != nil {
		t.Fatal(err)
	}
	if got := slices.Sorted(maps.Keys(single)); slices.Contains(got, "PodDisruptionBudget/r-loaddistributor") || !slices.Contains(got, "PersistentVolumeClaim/r-loaddistributor") {
		t.Errorf("a single loaddistributor has %q", got)
	}
	secured, err := render(t, map[string]any{
		"loaddistributor": etcd, "tls": map[string]any{"secretName": "tls"}, "tokens": map[string]any{"secretName": "tokens"},
		"brokers":       map[string]any{"bpf": true, "extraArgs": []any{"--retain=24h"}, "storage": map[string]any{"size": "1Ti", "className": "fast"}},
		"networkPolicy": map[string]any{"clients": []any{map[string]any{"ipBlock": map[string]any{"cidr": "10.0.0.0/8"}}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	control := secured["Deployment/r-loaddistributor"].(*appsv1.Deployment).Spec.Template.Spec
	if args := control.Containers[0].Args; slices.Contains(args, "--allow-insecure-listen") || !slices.Contains(args, "--http-tls") || len(control.Volumes) != 3 {
		t.Errorf("with TLS: %q, %v", args, control.Volumes)
	}
	if control.Containers[0].ReadinessProbe.HTTPGet.Scheme != corev1.URISchemeHTTPS {
		t.Error("the probe does not speak TLS")
	}
	pod := secured["StatefulSet/r-broker"].(*appsv1.StatefulSet).Spec.Template.Spec
	if !slices.Equal(pod.Containers[0].SecurityContext.Capabilities.Add, []corev1.Capability{"BPF", "PERFMON"}) || !slices.Contains(pod.Containers[0].Args, "--retain=24h") {
		t.Errorf("%+v", pod.Containers[0])
	}
	for name, values := range map[string]map[string]any{
		"no etcd":         {},
		"TLS alone":       {"loaddistributor": etcd, "tls": map[string]any{"secretName": "tls"}},
		"an unknown key":  {"loaddistributor": etcd, "broker": map[string]any{}},
		"a wrong type":    {"loaddistributor": etcd, "brokers": map[string]any{"replicas": "three"}},
		"no size at all":  {"loaddistributor": etcd, "brokers": map[string]any{"storage": map[string]any{"size": "much"}}},
		"no such setting": {"loaddistributor": etcd, "brokers": map[string]any{"durability": "hope"}},
	} {
		if _, err := render(t, values); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

// MQTT is off unless the values say otherwise. With MQTT the port is in the service, the pods and the
// network policy, and the brokers read the rules of the values.
func TestChartWithMQTT(t *testing.T) {
	without, err := render(t, map[string]any{"loaddistributor": etcd})
	if err != nil {
		t.Fatal(err)
	}
	if ports := without["Service/r-brokers"].(*corev1.Service).Spec.Ports; len(ports) != 2 {
		t.Errorf("ports without MQTT: %v", ports)
	}
	const rules = "[[mqtt]]\nfilter = \"fleet/+\"\ntopic = \"fleet\"\n"
	objects, err := render(t, map[string]any{"loaddistributor": etcd, "brokers": map[string]any{"mqtt": map[string]any{"enabled": true, "rules": rules}}})
	if err != nil {
		t.Fatal(err)
	}
	pod := objects["StatefulSet/r-broker"].(*appsv1.StatefulSet).Spec.Template
	c := pod.Spec.Containers[0]
	for _, flag := range []string{"--mqtt-address=0.0.0.0:1883", "--mqtt-rules=/etc/srtm/mqtt/rules.toml"} {
		if !slices.Contains(c.Args, flag) {
			t.Errorf("%s is not in %q", flag, c.Args)
		}
	}
	if got := objects["ConfigMap/r-mqtt"].(*corev1.ConfigMap).Data["rules.toml"]; got != rules {
		t.Errorf("rules: %q", got)
	}
	if v := pod.Spec.Volumes; len(v) != 1 || v[0].ConfigMap == nil || v[0].ConfigMap.Name != "r-mqtt" {
		t.Errorf("volumes: %v", v)
	}
	if !slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.Name == "mqtt" && m.MountPath == "/etc/srtm/mqtt" }) {
		t.Errorf("mounts: %v", c.VolumeMounts)
	}
	service := objects["Service/r-brokers"].(*corev1.Service).Spec.Ports
	policy := objects["NetworkPolicy/r-broker"].(*networkingv1.NetworkPolicy).Spec.Ingress[0].Ports
	if len(service) != 3 || service[2].Port != 1883 || c.Ports[2].ContainerPort != 1883 || len(policy) != 3 || policy[2].Port.IntValue() != 1883 {
		t.Errorf("ports of the service %v, of the pods %v, of the policy %v", service, c.Ports, policy)
	}
}

// The programs know all flags in the chart and the compose file.
func TestFlagsExist(t *testing.T) {
	objects, err := render(t, map[string]any{
		"loaddistributor": etcd, "tls": map[string]any{"secretName": "tls"}, "tokens": map[string]any{"secretName": "tokens"},
		"brokers": map[string]any{"mqtt": map[string]any{"enabled": true, "rules": "# none"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	var commands [][]string
	for _, pod := range []corev1.PodTemplateSpec{objects["StatefulSet/r-broker"].(*appsv1.StatefulSet).Spec.Template, objects["Deployment/r-loaddistributor"].(*appsv1.Deployment).Spec.Template} {
		commands = append(commands, slices.Concat(pod.Spec.Containers[0].Command, pod.Spec.Containers[0].Args))
	}
	for _, s := range composed(t).Services {
		commands = append(commands, s.Command)
	}
	dir := t.TempDir()
	build := exec.Command("go", "build", "-o", dir, "./nsqd", "./loaddistributor")
	build.Dir = filepath.Dir(deploy)
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, c := range commands {
		// Flags are parsed in order, and --help at the end prevents any other action.
		if out, err := exec.Command(filepath.Join(dir, c[0]), append(c[1:], "--help")...).CombinedOutput(); err != nil {
			t.Errorf("%q: %v\n%s", c, err, out)
		}
	}
}

func composed(t *testing.T) *types.Project {
	t.Helper()
	file := filepath.Join(deploy, "compose.yaml")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	project, err := loader.LoadWithContext(t.Context(), types.ConfigDetails{
		WorkingDir: deploy, ConfigFiles: []types.ConfigFile{{Filename: file, Content: text}}, Environment: types.Mapping{},
	})
	if err != nil {
		t.Fatal(err)
	}
	return project
}

func TestCompose(t *testing.T) {
	project := composed(t)
	if names := project.ServiceNames(); !slices.Equal(names, []string{"broker1", "broker2", "loaddistributor"}) {
		t.Fatalf("services %q", names)
	}
	for _, s := range project.Services {
		if !s.ReadOnly || !slices.Equal(s.CapDrop, []string{"ALL"}) || len(s.Volumes) != 1 {
			t.Errorf("%s: %+v", s.Name, s)
		}
		for _, p := range s.Ports {
			if p.HostIP != "127.0.0.1" {
				t.Errorf("%s publishes %v beyond loopback", s.Name, p)
			}
		}
	}
}

// The relevant rules of Hadolint: a pinned image, COPY and no ADD, commands in JSON, and a user other
// than root at the end.
func TestDockerfile(t *testing.T) {
	f, err := os.Open(filepath.Join(deploy, "Dockerfile"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	parsed, err := parser.Parse(f)
	if err != nil {
		t.Fatal(err)
	}
	if len(parsed.Warnings) > 0 {
		t.Errorf("warnings: %v", parsed.Warnings)
	}
	last := map[string]string{}
	for _, n := range parsed.AST.Children {
		command := strings.ToUpper(n.Value)
		value := ""
		if n.Next != nil {
			value = n.Next.Value
		}
		switch {
		case command == "ADD":
			t.Errorf("line %d: ADD", n.StartLine)
		case command == "FROM" && value != "scratch" && !strings.Contains(value, ":"):
			t.Errorf("line %d: %s has no version", n.StartLine, value)
		case (command == "CMD" || command == "ENTRYPOINT") && !n.Attributes["json"]:
			t.Errorf("line %d: %s goes through a shell, which there is none of", n.StartLine, command)
		}
		last[command] = value
	}
	if last["FROM"] != "scratch" || last["USER"] != "10001:10001" {
		t.Errorf("it ends with %v", last)
	}
}
