package runner

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"pgregory.net/rapid"

	"github.com/fairlead/fairlead/internal/runner/shim"
)

func addrs(s ...string) []netip.Addr {
	var out []netip.Addr
	for _, a := range s {
		out = append(out, netip.MustParseAddr(a))
	}
	return out
}

func TestExpand(t *testing.T) {
	known := func(name string) (string, bool) {
		v, ok := map[string]string{"A": "1", "B": "$(A)", "EMPTY": ""}[name]
		return v, ok
	}
	for in, want := range map[string]string{
		"plain": "plain", "$(A)": "1", "x$(A)y$(A)": "x1y1", "$(NO)": "$(NO)", "$$(A)": "$(A)", "$$$(A)": "$1",
		"$(A": "$(A", "$": "$", "$x": "$x", "$(B)": "$(A)", "[$(EMPTY)]": "[]", "$()": "$()", "$$": "$",
	} {
		if got := expand(in, known); got != want {
			t.Errorf("expand(%q) = %q, want %q", in, got, want)
		}
	}
}

func FuzzExpand(f *testing.F) {
	f.Add("a $(B) $$(C) $(")
	f.Fuzz(func(t *testing.T, s string) {
		got := expand(s, func(string) (string, bool) { return "", false })
		if !strings.Contains(s, "$$") && got != s {
			t.Errorf("expand(%q) = %q without known names", s, got)
		}
	})
}

// No address given out twice, none of the node's own, all inside, and each time the free
// one that comes next in the round, so that none is used again at once.
func TestIPAM(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		bits := rapid.IntRange(26, 30).Draw(t, "bits")
		r := netip.PrefixFrom(netip.MustParseAddr("10.1.2.0"), bits)
		m := newIPAM()
		m.setRanges([]netip.Prefix{r, netip.MustParsePrefix("fd00::/64")})
		var round []netip.Addr // the usable ones: all but the first two and the last
		for a := r.Addr().Next().Next(); r.Contains(a.Next()); a = a.Next() {
			round = append(round, a)
		}
		held, place := map[netip.Addr][]netip.Addr{}, 0
		var order []netip.Addr
		for range 100 {
			if len(order) > 0 && rapid.Bool().Draw(t, "release") {
				i := rapid.IntRange(0, len(order)-1).Draw(t, "which")
				m.release(held[order[i]])
				delete(held, order[i])
				order = append(order[:i], order[i+1:]...)
				continue
			}
			got, err := m.allocate()
			if len(held) == len(round) {
				if err == nil {
					t.Fatalf("%v out of a full range", got)
				}
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			for held[round[place%len(round)]] != nil {
				place++
			}
			want := round[place%len(round)]
			place++
			if got[0] != want {
				t.Fatalf("%s, want %s", got[0], want)
			}
			held[want] = got
			order = append(order, want)
		}
	})
}

func TestIPAMRemembers(t *testing.T) {
	r := []netip.Prefix{netip.MustParsePrefix("10.1.2.0/24")}
	a := newIPAM()
	a.setRanges(r)
	first, _ := a.allocate()
	second, _ := a.allocate()
	a.release(second)
	b := newIPAM()
	b.setLastAddresses(a.lastAddresses())
	b.reserve(first)
	b.setRanges(r)
	third, err := b.allocate()
	if err != nil || third[0] != netip.MustParseAddr("10.1.2.4") {
		t.Errorf("%v, %v; want 10.1.2.4, for .3 was in use until now", third, err)
	}
}

func TestResolvConf(t *testing.T) {
	const host = "nameserver 192.0.2.53\nsearch example.org .\noptions timeout:1\n# comment\n"
	two := "2"
	for _, c := range []struct {
		name    string
		spec    corev1.PodSpec
		servers []netip.Addr
		want    string
	}{
		{"cluster first", corev1.PodSpec{DNSPolicy: corev1.DNSClusterFirst}, addrs("10.96.0.10", "fd00:10:96::a"),
			"search shop.svc.cluster.local svc.cluster.local cluster.local example.org\nnameserver 10.96.0.10\nnameserver " +
				"fd00:10:96::a\noptions ndots:5\n"},
		{"no cluster DNS", corev1.PodSpec{DNSPolicy: corev1.DNSClusterFirst}, nil,
			"search example.org\nnameserver 192.0.2.53\noptions timeout:1\n"},
		{"default", corev1.PodSpec{DNSPolicy: corev1.DNSDefault}, addrs("10.96.0.10"),
			"search example.org\nnameserver 192.0.2.53\noptions timeout:1\n"},
		{"host network", corev1.PodSpec{DNSPolicy: corev1.DNSClusterFirst, HostNetwork: true}, addrs("10.96.0.10"),
			"search example.org\nnameserver 192.0.2.53\noptions timeout:1\n"},
		{"host network, cluster first", corev1.PodSpec{DNSPolicy: corev1.DNSClusterFirstWithHostNet, HostNetwork: true}, addrs("10.96.0.10"),
			"search shop.svc.cluster.local svc.cluster.local cluster.local example.org\nnameserver 10.96.0.10\noptions ndots:5\n"},
		{"none", corev1.PodSpec{DNSPolicy: corev1.DNSNone, DNSConfig: &corev1.PodDNSConfig{Nameservers: []string{"1.1.1.1"},
			Searches: []string{"a.b"}}}, addrs("10.96.0.10"),
			"search a.b\nnameserver 1.1.1.1\n"},
		{"config on top", corev1.PodSpec{DNSConfig: &corev1.PodDNSConfig{
			Nameservers: []string{"10.96.0.10", "1.1.1.1"}, Searches: []string{"a.b"},
			Options: []corev1.PodDNSConfigOption{{Name: "ndots", Value: &two}, {Name: "edns0"}}}}, addrs("10.96.0.10"),
			"search shop.svc.cluster.local svc.cluster.local cluster.local example.org a.b\nnameserver 10.96.0.10\nnameserver " +
				"1.1.1.1\noptions ndots:2 edns0\n"},
	} {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}, Spec: c.spec}
		if d := cmp.Diff(c.want, resolvConf(pod, c.servers, "cluster.local", host)); d != "" {
			t.Errorf("%s: %s", c.name, d)
		}
	}
}

func TestHostsFile(t *testing.T) {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web-0"}, Spec: corev1.PodSpec{
		Hostname: "db", Subdomain: "dbs", HostAliases: []corev1.HostAlias{{IP: "192.0.2.1", Hostnames: []string{"a", "b"}}},
	}}
	got := hostsFile(pod, addrs("10.1.1.2", "fd00::2"), "cluster.local")
	for _, want := range []string{"127.0.0.1\tlocalhost\n", "10.1.1.2\tdb.dbs.shop.svc.cluster.local\tdb\n",
		"fd00::2\tdb.dbs.shop.svc.cluster.local\tdb\n", "192.0.2.1\ta\tb\n"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
	long := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: strings.Repeat("x", 62) + "-y"}}
	if got := hostnameOf(long); len(got) != 62 {
		t.Errorf("hostname %q of %d characters", got, len(got))
	}
}

func TestVariables(t *testing.T) {
	client := fake.NewClientset(
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "cm"}, Data: map[string]string{"COLOR": "red", "SIZE": "1"}},
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "sec"}, Data: map[string][]byte{"key": []byte("hush")}},
	)
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", UID: "u1", Labels: map[string]string{"app": "w", "b": "x"},
			Annotations: map[string]string{"note": "n"}},
		Spec: corev1.PodSpec{NodeName: "node-a", ServiceAccountName: "sa"},
	}
	f := facts{pod: pod, ips: addrs("10.1.1.2", "fd00::2"), hostIPs: addrs("192.0.2.1")}
	ref := func(path string) *corev1.EnvVarSource {
		return &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: path}}
	}
	c := &corev1.Container{
		EnvFrom: []corev1.EnvFromSource{{Prefix: "CM_",
			ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "cm"}}}},
		Env: []corev1.EnvVar{
			{Name: "CM_SIZE", Value: "2"},
			{Name: "ALL", Value: "$(CM_COLOR) $(DB_SERVICE_HOST) $(LATER) $(CM_SIZE)"},
			{Name: "LATER", Value: "x"},
			{Name: "SECRET", ValueFrom: &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{
				LocalObjectReference: corev1.LocalObjectReference{Name: "sec"}, Key: "key",
			}}},
			{Name: "NONE", ValueFrom: &corev1.EnvVarSource{ConfigMapKeyRef: &corev1.ConfigMapKeySelector{
				LocalObjectReference: corev1.LocalObjectReference{Name: "no"}, Key: "key", Optional: new(true),
			}}},
			{Name: "NS", ValueFrom: ref("metadata.namespace")}, {Name: "UID", ValueFrom: ref("metadata.uid")},
			{Name: "APP", ValueFrom: ref("metadata.labels['app']")},
			{Name: "NOTE", ValueFrom: ref("metadata.annotations['note']")}, {Name: "NODE", ValueFrom: ref("spec.nodeName")},
			{Name: "SA", ValueFrom: ref("spec.serviceAccountName")},
			{Name: "IP", ValueFrom: ref("status.podIP")}, {Name: "IPS", ValueFrom: ref("status.podIPs")},
			{Name: "HOST", ValueFrom: ref("status.hostIP")},
			{Name: "DB_SERVICE_PORT", Value: "hidden"},
		},
	}
	services := []corev1.EnvVar{{Name: "DB_SERVICE_HOST", Value: "10.96.0.3"}, {Name: "DB_SERVICE_PORT", Value: "5432"}}
	got, err := variables(t.Context(), f, c, services, source{client: client, namespace: "shop"})
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for _, v := range got {
		lines = append(lines, v.Name+"="+v.Value)
	}
	want := []string{
		"CM_COLOR=red", "CM_SIZE=2", "ALL=red 10.96.0.3 $(LATER) 2", "LATER=x", "SECRET=hush", "NS=shop", "UID=u1", "APP=w", "NOTE=n",
		"NODE=node-a", "SA=sa",
		"IP=10.1.1.2", "IPS=10.1.1.2,fd00::2", "HOST=192.0.2.1", "DB_SERVICE_PORT=hidden", "DB_SERVICE_HOST=10.96.0.3",
	}
	if d := cmp.Diff(want, lines); d != "" {
		t.Error(d)
	}
	for name, bad := range map[string]*corev1.EnvVarSource{
		"fieldPath \"spec.containers\" is not supported": ref("spec.containers"),
		"Secret \"no\" does not exist": {SecretKeyRef: &corev1.SecretKeySelector{
			LocalObjectReference: corev1.LocalObjectReference{Name: "no"}, Key: "k",
		}},
		"ConfigMap \"cm\" has no key \"k\"": {ConfigMapKeyRef: &corev1.ConfigMapKeySelector{
			LocalObjectReference: corev1.LocalObjectReference{Name: "cm"}, Key: "k",
		}},
		"others are not supported": {ResourceFieldRef: &corev1.ResourceFieldSelector{Resource: "limits.cpu"}},
	} {
		_, err := variables(t.Context(), f, &corev1.Container{Env: []corev1.EnvVar{{Name: "X", ValueFrom: bad}}}, nil,
			source{client: client, namespace: "shop"})
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("error %v, want %q", err, name)
		}
	}
}

func TestVolumeFiles(t *testing.T) {
	unowned := owner{uid: -1, gid: -1}
	dir := filepath.Join(t.TempDir(), "v")
	for _, files := range []map[string]file{
		{"a": {data: []byte("1")}, "sub/b": {data: []byte("2"), mode: new(int32(0o400))}},
		{"a": {data: []byte("3")}},
	} {
		if err := writeFiles(dir, files, new(int32(0o640)), unowned); err != nil {
			t.Fatal(err)
		}
		for name, f := range files {
			if b, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(b) != string(f.data) {
				t.Errorf("%s: %q, %v", name, b, err)
			}
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "sub/b")); err == nil {
		t.Error("a file that is no more is still there")
	}
	if st, err := os.Stat(filepath.Join(dir, "a")); err != nil || st.Mode().Perm() != 0o640 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
	// What a group may read at once stays as it is when nothing has changed.
	link := ""
	for range 2 {
		if err := writeFiles(dir, map[string]file{"c": {}}, new(int32(0o400)), owner{uid: -1, gid: os.Getegid(), more: 0o440}); err != nil {
			t.Fatal(err)
		}
		st, err1 := os.Stat(filepath.Join(dir, "c"))
		to, err2 := os.Readlink(filepath.Join(dir, dataLink))
		if err1 != nil || err2 != nil || st.Mode().Perm() != 0o440 || link != "" && to != link {
			t.Errorf("%v, %v, %v; the files are in %s, before in %q", st.Mode(), err1, err2, to, link)
		}
		link = to
	}
	if err := writeFiles(dir, map[string]file{"../out": {}}, nil, unowned); err == nil {
		t.Error("a file outside of the volume was written")
	}
	c := &corev1.Container{VolumeMounts: []corev1.VolumeMount{{Name: "v", MountPath: "/mnt", SubPath: "../x"}}}
	if _, err := binds(c, map[string]string{"v": dir}, nil); err == nil {
		t.Error("a subPath outside of the volume was taken")
	}
}

func TestBackoff(t *testing.T) {
	b := backoff{base: 10 * time.Second}
	var got []time.Duration
	for range 9 {
		got = append(got, b.next(time.Second))
	}
	got = append(got, b.next(11*time.Minute), b.next(time.Second))
	s := time.Second
	want := []time.Duration{0, 10 * s, 20 * s, 40 * s, 80 * s, 160 * s, 300 * s, 300 * s, 300 * s, 0, 10 * s}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

// view makes a podState out of one letter per container: lower case init, upper
// case main. w waiting, r running, s succeeded, f failed for good, c crashed and
// to be started again.
func view(policy corev1.RestartPolicy, containers string, over bool) podState {
	v := podState{pod: &corev1.Pod{Spec: corev1.PodSpec{RestartPolicy: policy}}, over: over, sandbox: true}
	for i, letter := range containers {
		c := &containerState{spec: &corev1.Container{Name: fmt.Sprint("c", i)}, role: roleInit}
		if letter < 'a' {
			c.role = roleMain
		}
		switch strings.ToLower(string(letter)) {
		case "r":
			c.now, c.started, c.ready = &shim.State{}, true, true
		case "s":
			c.now = &shim.State{Exited: true}
		case "f":
			c.now = &shim.State{Exited: true, ExitCode: 1}
		case "c":
			c.now, c.waiting = &shim.State{Exited: true, ExitCode: 1}, &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}
		}
		v.containers = append(v.containers, c)
	}
	return v
}

func TestPhase(t *testing.T) {
	const always, never = corev1.RestartPolicyAlways, corev1.RestartPolicyNever
	for _, c := range []struct {
		policy     corev1.RestartPolicy
		containers string
		over       bool
		want       corev1.PodPhase
		ready      bool
	}{
		{always, "W", false, corev1.PodPending, false},
		{always, "R", false, corev1.PodRunning, true},
		{always, "RR", false, corev1.PodRunning, true},
		{always, "RW", false, corev1.PodPending, false},
		{always, "RC", false, corev1.PodRunning, false},
		{always, "C", false, corev1.PodRunning, false},
		{always, "rW", false, corev1.PodPending, false},
		{always, "sR", false, corev1.PodRunning, true},
		{always, "cW", false, corev1.PodPending, false},
		{never, "RS", false, corev1.PodRunning, false},
		{never, "RF", false, corev1.PodRunning, false},
		{never, "S", true, corev1.PodSucceeded, false},
		{never, "SF", true, corev1.PodFailed, false},
		{never, "fW", true, corev1.PodFailed, false},
		{never, "W", true, corev1.PodFailed, false},
	} {
		st := view(c.policy, c.containers, c.over).status(time.Now())
		ready := st.Conditions[conditionIndex(st.Conditions, corev1.PodReady)].Status == corev1.ConditionTrue
		if st.Phase != c.want || ready != c.ready {
			t.Errorf("%s %s over=%v: %s, ready %v; want %s, %v", c.policy, c.containers, c.over, st.Phase, ready, c.want, c.ready)
		}
	}
}

// A transition time moves with the status and not with anything else.
func TestTransitionTimes(t *testing.T) {
	at := time.Date(2026, 1, 2, 12, 0, 0, 0, time.UTC)
	v := view(corev1.RestartPolicyAlways, "R", false)
	v.pod.Status = v.status(at)
	v.pod.Status = v.status(at.Add(time.Minute))
	when := func() time.Time {
		return v.pod.Status.Conditions[conditionIndex(v.pod.Status.Conditions, corev1.PodReady)].LastTransitionTime.Time
	}
	if !when().Equal(at) {
		t.Errorf("moved to %v without a change", when())
	}
	v.containers[0].ready = false
	v.pod.Status = v.status(at.Add(2 * time.Minute))
	if !when().Equal(at.Add(2 * time.Minute)) {
		t.Errorf("%v, want the time of the change", when())
	}
}

func TestStatusPatch(t *testing.T) {
	base := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: "u1"}}
	base.Status.Conditions = []corev1.PodCondition{{Type: "example.com/theirs", Status: corev1.ConditionTrue},
		{Type: corev1.PodScheduled, Status: corev1.ConditionTrue}}
	want := view(corev1.RestartPolicyAlways, "R", false).status(time.Now())
	want.Conditions = append(want.Conditions, corev1.PodCondition{Type: "example.com/theirs", Status: corev1.ConditionFalse})
	patch, err := statusPatch(base, &want)
	if err != nil || !strings.Contains(string(patch), `"uid":"u1"`) ||
		strings.Contains(string(patch), `"example.com/theirs","status":"False"`) || strings.Contains(string(patch), "theirs\",\"lastP") {
		t.Errorf("patch %s, %v", patch, err)
	}
	same := base.DeepCopy()
	same.Status = want
	if patch, err := statusPatch(same, &want); patch != nil || err != nil {
		t.Errorf("a patch without a change: %s, %v", patch, err)
	}
}

func TestNewer(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want bool
	}{{"10", "9", true}, {"9", "10", false}, {"9", "9", false}, {"", "9", false}, {"9", "", true}, {"x", "y", false}} {
		if got := newer(c.a, c.b); got != c.want {
			t.Errorf("newer(%q, %q) = %v", c.a, c.b, got)
		}
	}
}

// A pod.json of any content must not stop the agent.
func FuzzReadPod(f *testing.F) {
	f.Add([]byte(`{"uid":"a","ips":["10.0.0.1"]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		p := podPaths{t.TempDir()}
		if err := os.WriteFile(p.pod(), b, 0o600); err != nil {
			t.Fatal(err)
		}
		if rec, err := readPod(p); err == nil && rec.UID == "" {
			t.Error("a record without a uid")
		}
	})
}

func TestGarbageOnDisk(t *testing.T) {
	dir := t.TempDir()
	o := Options{Client: fake.NewClientset(), NodeName: "n", StateDir: dir}
	r, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"empty": "", "broken": "{", "liar": `{"uid":"other"}`} {
		d := filepath.Join(dir, "pods", name)
		if err := os.MkdirAll(d, 0o700); err != nil {
			t.Fatal(err)
		}
		if text != "" {
			if err := os.WriteFile(filepath.Join(d, "pod.json"), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	if err := r.adopt(ctx); err != nil {
		t.Fatal(err)
	}
	if left, err := podDirs(filepath.Join(dir, "pods")); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}
