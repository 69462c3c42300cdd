package table

import (
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/txtar"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"sigs.k8s.io/yaml"

	"github.com/fairlead/fairlead/internal/svc"
)

var update = flag.Bool("update", false, "rewrite the expected texts in testdata; read the difference before you keep it")

// TestScripts plays every testdata/*.txtar: a file "flags" sets up the Builder, *.yaml are objects to set, "delete*" names
// objects to delete, "servers*" has the lines for SetServers, "unreached*" names nodes for SetUnreached, "hops*" has lines
// "NODE IPV4 [IPV6]" for SetNextHops, "hosts*" has the
// lines for SetHostPorts, "own*" has lines for SetOwnPods, and "want*" is what Build then returns.
func TestScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts found (%v)", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			a, err := txtar.ParseFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if playScript(t, a) && *update {
				if err := os.WriteFile(file, txtar.Format(a), 0o644); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

func playScript(t *testing.T, a *txtar.Archive) (differs bool) {
	t.Helper()
	b := NewBuilder(Config{NodeName: "here"})
	wants := 0
	for i, f := range a.Files {
		switch {
		case f.Name == "flags":
			b = builderOf(t, string(f.Data))
		case strings.HasSuffix(f.Name, ".yaml"):
			setObjects(t, b, string(f.Data))
		case strings.HasPrefix(f.Name, "servers"):
			var servers []netip.AddrPort
			for _, at := range strings.Fields(string(f.Data)) {
				servers = append(servers, netip.MustParseAddrPort(at))
			}
			b.SetServers(servers)
		case strings.HasPrefix(f.Name, "hosts"):
			b.SetHostPorts(hostPortsOf(t, string(f.Data)))
		case strings.HasPrefix(f.Name, "own"):
			b.SetOwnPods(ownPodsOf(t, string(f.Data)))
		case strings.HasPrefix(f.Name, "unreached"):
			b.SetUnreached(strings.Fields(string(f.Data)))
		case strings.HasPrefix(f.Name, "hops"):
			b.SetNextHops(nextHopsOf(t, string(f.Data)))
		case strings.HasPrefix(f.Name, "delete"):
			deleteObjects(t, b, string(f.Data))
		case strings.HasPrefix(f.Name, "want"):
			wants++
			got := buildText(b)
			if diff := cmp.Diff(string(f.Data), got); diff != "" {
				differs = true
				a.Files[i].Data = []byte(got)
				if !*update {
					t.Errorf("%s: (-want +got)\n%s", f.Name, diff)
				}
			}
		default:
			t.Fatalf("unknown file %q", f.Name)
		}
	}
	if wants == 0 {
		t.Fatal("the script expects nothing")
	}
	return differs
}

// ownPodsOf reads lines "UID ready|unready [IPS]".
func ownPodsOf(t *testing.T, text string) map[string]svc.OwnPod {
	t.Helper()
	out := map[string]svc.OwnPod{}
	for line := range strings.Lines(text) {
		words := strings.Fields(line)
		if len(words) < 2 || words[1] != "ready" && words[1] != "unready" {
			t.Fatalf("%q is not UID ready|unready [IPS]", line)
		}
		p := svc.OwnPod{Ready: words[1] == "ready"}
		if len(words) > 2 {
			for ip := range strings.SplitSeq(words[2], ",") {
				p.IPs = append(p.IPs, netip.MustParseAddr(ip))
			}
		}
		out[words[0]] = p
	}
	return out
}

func nextHopsOf(t *testing.T, text string) map[string]NextHop {
	t.Helper()
	out := map[string]NextHop{}
	for line := range strings.Lines(text) {
		words := strings.Fields(line)
		h := NextHop{IPv4: netip.MustParseAddr(words[1])}
		if len(words) > 2 {
			h.IPv6 = netip.MustParseAddr(words[2])
		}
		out[words[0]] = h
	}
	return out
}

// forwardingOf reads the annotation as a proxy in mode nft does.
func forwardingOf(annotations map[string]string) (bool, error) {
	switch v := annotations[svc.ForwardingAnnotation]; v {
	case svc.ForwardingDirect:
		return true, nil
	case "":
		return false, nil
	default:
		return false, fmt.Errorf("%q is wrong", v)
	}
}

// hostPortsOf reads lines "POD IPS PROTOCOL PORT TO [HOSTIP]", those of a Pod together.
func hostPortsOf(t *testing.T, text string) (out []svc.HostPorts) {
	t.Helper()
	for line := range strings.Lines(text) {
		var name, ips, proto string
		var p svc.HostPort
		_, err := fmt.Sscan(line, &name, &ips, &proto, &p.Port, &p.To)
		must(t, err)
		p.Protocol, err = svc.ParseProtocol(proto)
		must(t, err)
		if words := strings.Fields(line); len(words) > 5 {
			p.HostIP = words[5]
		}
		if len(out) == 0 || out[len(out)-1].Pod.Name != name {
			out = append(out, svc.HostPorts{Pod: svc.Name{Namespace: "default", Name: name}})
		}
		h := &out[len(out)-1]
		h.IPs = nil
		for ip := range strings.SplitSeq(ips, ",") {
			h.IPs = append(h.IPs, netip.MustParseAddr(ip))
		}
		h.Ports = append(h.Ports, p)
	}
	return out
}

// buildText is a Build as text: the Table, the problems and the changed keys.
func buildText(b *Builder) string {
	tab, keys := b.Build()
	var out strings.Builder
	out.WriteString(tab.String())
	for _, p := range b.Problems() {
		fmt.Fprintf(&out, "problem %s\n", p)
	}
	var changed []string
	for _, k := range keys {
		changed = append(changed, fmt.Sprintf("changed %s %s", k.ID, k.Family))
	}
	slices.Sort(changed)
	for _, c := range changed {
		fmt.Fprintln(&out, c)
	}
	return out.String()
}

func builderOf(t *testing.T, flags string) *Builder {
	t.Helper()
	cfg := Config{NodeName: "here"}
	var addrs []netip.Addr
	for line := range strings.Lines(flags) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		switch name {
		case "nodeport-addresses":
			n, err := ParseNodePortAddresses(strings.Split(value, ","))
			if err != nil {
				t.Fatal(err)
			}
			cfg.NodePortAddresses = n
		case "cluster-cidr":
			for _, c := range strings.Split(value, ",") {
				cfg.ClusterCIDRs = append(cfg.ClusterCIDRs, netip.MustParsePrefix(c))
			}
		case "detect-local-mode":
			var err error
			if cfg.DetectLocal, err = ParseDetectLocal(value); err != nil {
				t.Fatal(err)
			}
		case "forwarding":
			cfg.Forwarding = forwardingOf
		case "masquerade-all":
			cfg.MasqueradeAll = true
		case "machine":
			for _, a := range strings.Split(value, ",") {
				addrs = append(addrs, netip.MustParseAddr(a))
			}
		default:
			t.Fatalf("unknown flag %q", name)
		}
	}
	b := NewBuilder(cfg)
	b.SetAddresses(addrs)
	return b
}

func setObjects(t *testing.T, b *Builder, text string) {
	t.Helper()
	for _, doc := range strings.Split(text, "\n---\n") {
		var kind struct{ Kind string }
		must(t, yaml.Unmarshal([]byte(doc), &kind))
		switch kind.Kind {
		case "Service":
			s := &corev1.Service{}
			must(t, yaml.UnmarshalStrict([]byte(doc), s))
			s.Namespace = or(s.Namespace, "default")
			b.SetService(s)
		case "EndpointSlice":
			s := &discoveryv1.EndpointSlice{}
			must(t, yaml.UnmarshalStrict([]byte(doc), s))
			s.Namespace = or(s.Namespace, "default")
			b.SetSlice(s)
		case "Node":
			n := &corev1.Node{}
			must(t, yaml.UnmarshalStrict([]byte(doc), n))
			b.SetNode(n)
		default:
			t.Fatalf("unknown kind %q", kind.Kind)
		}
	}
}

func deleteObjects(t *testing.T, b *Builder, text string) {
	t.Helper()
	for line := range strings.Lines(text) {
		kind, name, _ := strings.Cut(strings.TrimSpace(line), " ")
		n, err := svc.ParseName(name)
		must(t, err)
		switch kind {
		case "Service":
			b.DeleteService(n)
		case "EndpointSlice":
			b.DeleteSlice(n)
		default:
			t.Fatalf("unknown kind %q", kind)
		}
	}
}

func or(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Problems returns what is wrong as of the last Build, by Service.
func (b *Builder) Problems() []Problem {
	var out []Problem
	for _, ps := range b.problems {
		out = append(out, ps...)
	}
	slices.SortFunc(out, compareProblems)
	return out
}
