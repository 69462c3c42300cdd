package pod

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/dns/resolvconf"
)

// hostnameOf returns the pod's host name: spec.hostname or the pod's name, cut to
// the 63 characters of a DNS label.
func hostnameOf(pod *corev1.Pod) string {
	name := pod.Spec.Hostname
	if name == "" {
		name = pod.Name
	}
	if len(name) > 63 {
		name = strings.TrimRight(name[:63], "-.")
	}
	return name
}

// hostsFile returns the /etc/hosts of a pod with its own network.
func hostsFile(pod *corev1.Pod, ips []netip.Addr, domain string) string {
	var b strings.Builder
	b.WriteString("# Written by fairlead for this pod.\n" +
		"127.0.0.1\tlocalhost\n" +
		"::1\tlocalhost ip6-localhost ip6-loopback\n" +
		"fe00::\tip6-localnet\n" +
		"ff00::\tip6-mcastprefix\n" +
		"ff02::1\tip6-allnodes\n" +
		"ff02::2\tip6-allrouters\n")
	name := hostnameOf(pod)
	if pod.Spec.Subdomain != "" {
		name = fmt.Sprintf("%s.%s.%s.svc.%s\t%s", name, pod.Spec.Subdomain, pod.Namespace, domain, name)
	}
	for _, ip := range ips {
		fmt.Fprintf(&b, "%s\t%s\n", ip, name)
	}
	for _, a := range pod.Spec.HostAliases {
		fmt.Fprintf(&b, "%s\t%s\n", a.IP, strings.Join(a.Hostnames, "\t"))
	}
	return b.String()
}

// resolver is the content of a resolv.conf.
type resolver struct {
	servers, searches, options []string
}

func parseResolver(text string) resolver {
	var r resolver
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) < 2 {
			continue
		}
		switch f[0] {
		case "nameserver":
			r.servers = append(r.servers, f[1])
		case "search", "domain":
			r.searches = f[1:] // the last one counts
		case "options":
			r.options = append(r.options, f[1:]...)
		}
	}
	r.searches = slices.DeleteFunc(slices.Clone(r.searches), func(s string) bool { return s == "." })
	return r
}

func (r resolver) String() string {
	var b strings.Builder
	if len(r.searches) > 0 {
		fmt.Fprintf(&b, "search %s\n", strings.Join(r.searches, " "))
	}
	for _, s := range r.servers {
		fmt.Fprintf(&b, "nameserver %s\n", s)
	}
	if len(r.options) > 0 {
		fmt.Fprintf(&b, "options %s\n", strings.Join(r.options, " "))
	}
	return b.String()
}

// resolvConf returns the /etc/resolv.conf of a pod: its dnsPolicy, with dnsConfig
// on top. host is the machine's own file.
func resolvConf(pod *corev1.Pod, servers []netip.Addr, domain, host string) string {
	own := parseResolver(host)
	r := own
	switch policy := pod.Spec.DNSPolicy; {
	case policy == corev1.DNSNone:
		r = resolver{}
	case policy == corev1.DNSDefault, len(servers) == 0,
		pod.Spec.HostNetwork && policy != corev1.DNSClusterFirstWithHostNet:
		// the machine's
	default:
		r = resolver{
			searches: unique(append([]string{pod.Namespace + ".svc." + domain, "svc." + domain, domain}, own.searches...)),
			options:  []string{"ndots:5"},
		}
		for _, s := range servers {
			r.servers = append(r.servers, s.String())
		}
	}
	if c := pod.Spec.DNSConfig; c != nil {
		r.servers = unique(append(slices.Clone(r.servers), c.Nameservers...))
		r.searches = unique(append(slices.Clone(r.searches), c.Searches...))
		r.options = mergeOptions(r.options, c.Options)
	}
	return r.String()
}

// mergeOptions replaces options by the pod's options of the same name.
func mergeOptions(have []string, over []corev1.PodDNSConfigOption) []string {
	out := slices.Clone(have)
	for _, o := range over {
		out = slices.DeleteFunc(out, func(h string) bool {
			name, _, _ := strings.Cut(h, ":")
			return name == o.Name
		})
		if o.Value != nil {
			out = append(out, o.Name+":"+*o.Value)
		} else {
			out = append(out, o.Name)
		}
	}
	return out
}

func unique(in []string) []string {
	var out []string
	for _, s := range in {
		if !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	return out
}

// writeEtc writes the files that are mounted over the machine's in a pod.
func (n *node) writeEtc(p Paths, pod *corev1.Pod, ips []netip.Addr) error {
	if len(n.ClusterDNS) == 0 && !pod.Spec.HostNetwork && (pod.Spec.DNSPolicy == corev1.DNSClusterFirst || pod.Spec.DNSPolicy == "") {
		n.Events.Event(pod, corev1.EventTypeWarning, "MissingClusterDNS",
			"no cluster DNS address is known: the pod gets the machine's resolv.conf")
	}
	files := map[string]string{
		"resolv.conf": resolvConf(pod, n.ClusterDNS, n.ClusterDomain, machineResolver()),
		"hosts":       hostsFile(pod, ips, n.ClusterDomain),
		"hostname":    hostnameOf(pod) + "\n",
	}
	for name, text := range files {
		// Readable for any user a container runs as, with any umask.
		if err := errors.Join(os.WriteFile(p.etc(name), []byte(text), 0o644), os.Chmod(p.etc(name), 0o644)); err != nil {
			return err
		}
	}
	return nil
}

// machineResolver returns the machine's resolv.conf, or systemd-resolved's file of
// the real servers if it names only its stub on the loopback device, which a pod
// cannot reach. What --configure-resolver added is no part of it.
func machineResolver() string {
	const real = "/run/systemd/resolve/resolv.conf"
	b, err := os.ReadFile(resolvconf.Original(resolvconf.Path))
	if err != nil {
		return ""
	}
	for _, s := range parseResolver(string(b)).servers {
		if a, err := netip.ParseAddr(s); err == nil && !a.IsLoopback() {
			return string(b)
		}
	}
	if better, err := os.ReadFile(real); err == nil {
		return string(better)
	}
	return string(b)
}
