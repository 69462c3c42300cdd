package migrate

import (
	"fmt"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/fairlead/fairlead/internal/kubeproxyconfig"
)

// Settings is how a cluster's kube-proxy is started.
type Settings struct {
	// Args are its arguments, without the program.
	Args []string
	// ConfigMap and Key are where its file is, empty without one.
	ConfigMap, Key string
	// Mode is iptables, ipvs or nftables.
	Mode string
	// Healthz and Metrics are where it answers on the node itself.
	Healthz, Metrics netip.AddrPort
	// EndsWithoutPort is set if it ends when another program has one of these (--bind-address-hard-fail).
	EndsWithoutPort bool
	// File is what its file asks for, nil without one.
	File *kubeproxyconfig.File
}

// Drains reports whether established connections end with kube-proxy's rules, and not only new ones: IPVS has its own table of them.
func (s *Settings) Drains() bool { return s.Mode == kubeproxyconfig.ModeIPVS }

// flags are the flags in arguments, as --name=value, --name value, or --name.
func flags(args []string) map[string]string {
	out := map[string]string{}
	for i, a := range args {
		name, ok := strings.CutPrefix(a, "--")
		if !ok {
			continue
		}
		name, value, has := strings.Cut(name, "=")
		if !has && i+1 < len(args) && !strings.HasPrefix(args[i+1], "-") {
			value = args[i+1]
		}
		out[strings.ReplaceAll(name, "_", "-")] = value
	}
	return out
}

// ReadSettings reads the flags and the file of kube-proxy. configMaps are of its namespace. An error names what cannot be
// read, or what fairlead proxy refuses.
func ReadSettings(d *appsv1.DaemonSet, configMaps map[string]*corev1.ConfigMap) (*Settings, error) {
	args, err := arguments(d)
	if err != nil {
		return nil, err
	}
	s := &Settings{Args: args, Mode: kubeproxyconfig.ModeIPTables}
	values := flags(args)
	if file := values["config"]; file != "" {
		text, err := s.find(d, configMaps, file)
		if err != nil {
			return nil, err
		}
		if values, err = s.parse(text); err != nil {
			return nil, fmt.Errorf("ConfigMap %s, %s: %w", s.ConfigMap, s.Key, err)
		}
	}
	if m := values["proxy-mode"]; m != "" {
		s.Mode = m
	}
	if v, ok := values["bind-address-hard-fail"]; ok {
		on, err := strconv.ParseBool(v)
		s.EndsWithoutPort = on || err != nil // the flag without a value is true
	}
	healthz, metrics, err := usual(values["bind-address"])
	if err != nil {
		return nil, err
	}
	if s.Healthz, err = listening(values, "healthz", netip.AddrPortFrom(healthz, 10256)); err != nil {
		return nil, err
	}
	s.Metrics, err = listening(values, "metrics", netip.AddrPortFrom(metrics, 10249))
	return s, err
}

// usual returns where kube-proxy listens for health checks and metrics unless it is told, by its --bind-address (getDefaultAddresses of
// its pkg/proxy/apis/config/v1alpha1/defaults.go).
func usual(bind string) (healthz, metrics netip.Addr, err error) {
	if bind == "" {
		bind = "0.0.0.0"
	}
	a, err := netip.ParseAddr(bind)
	switch {
	case err != nil:
		return a, a, fmt.Errorf("--bind-address is %q; want an IP address", bind)
	case a.Unmap().Is4():
		return netip.IPv4Unspecified(), netip.MustParseAddr("127.0.0.1"), nil
	}
	return netip.IPv6Unspecified(), netip.IPv6Loopback(), nil
}

// find returns the text of a file that kube-proxy mounts from a ConfigMap.
func (s *Settings) find(d *appsv1.DaemonSet, configMaps map[string]*corev1.ConfigMap, file string) (string, error) {
	spec := &d.Spec.Template.Spec
	for _, m := range spec.Containers[0].VolumeMounts {
		if path.Dir(file) != path.Clean(m.MountPath) {
			continue
		}
		for _, v := range spec.Volumes {
			if v.Name != m.Name || v.ConfigMap == nil {
				continue
			}
			s.ConfigMap, s.Key = v.ConfigMap.Name, path.Base(file)
			for _, item := range v.ConfigMap.Items {
				if item.Path == s.Key {
					s.Key = item.Key
					break
				}
			}
			c := configMaps[s.ConfigMap]
			if c == nil || c.Data[s.Key] == "" {
				return "", fmt.Errorf("kube-proxy's --config is the key %s of the ConfigMap %s, which is not there", s.Key, s.ConfigMap)
			}
			return c.Data[s.Key], nil
		}
	}
	return "", fmt.Errorf("kube-proxy's --config is %s, which it mounts from no ConfigMap: its settings cannot be read", file)
}

// parse reads a KubeProxyConfiguration, and returns its values by their flags.
func (s *Settings) parse(text string) (map[string]string, error) {
	var doc yaml.Node
	if err := yaml.Unmarshal([]byte(text), &doc); err != nil {
		return nil, err
	}
	if len(doc.Content) == 0 || !kubeproxyconfig.Is(doc.Content[0]) {
		return nil, fmt.Errorf("want a document with apiVersion %s and kind %s", kubeproxyconfig.APIVersion, kubeproxyconfig.Kind)
	}
	f, err := kubeproxyconfig.Parse([]byte(text), doc.Content[0])
	if err != nil {
		return nil, err
	}
	s.File = f
	values := map[string]string{}
	for _, set := range f.Settings {
		values[set.Flag] = strings.Join(set.Values, ",")
	}
	return values, nil
}

// listening returns where a server of kube-proxy answers on its node.
func listening(values map[string]string, what string, at netip.AddrPort) (netip.AddrPort, error) {
	flag, usual := what+"-bind-address", at
	if port, err := strconv.ParseUint(values[what+"-port"], 10, 16); err == nil {
		at = netip.AddrPortFrom(at.Addr(), uint16(port))
	}
	if text := values[flag]; text != "" {
		if a, err := netip.ParseAddr(text); err == nil {
			at = netip.AddrPortFrom(a, at.Port())
		} else if at, err = netip.ParseAddrPort(text); err != nil {
			return at, fmt.Errorf("--%s is %q; want IP:PORT", flag, text)
		}
	}
	switch {
	case at.Port() == 0:
		return at, fmt.Errorf("kube-proxy has no --%s, by which a node is checked: give it one, such as %s", flag, usual)
	case at.Addr().IsUnspecified() && at.Addr().Is4():
		at = netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), at.Port())
	case at.Addr().IsUnspecified():
		at = netip.AddrPortFrom(netip.IPv6Loopback(), at.Port())
	}
	return at, nil
}

// probe makes a probe ask where kube-proxy answered.
func (s *Settings) probe(p *corev1.Probe) {
	if p == nil || p.HTTPGet == nil {
		return
	}
	p.HTTPGet.Host = s.Healthz.Addr().String()
	p.HTTPGet.Port = intstr.FromInt32(int32(s.Healthz.Port()))
}

// has reports whether an argument of kube-proxy is there, in whatever form.
func (s *Settings) has(flag string) bool {
	_, ok := flags(s.Args)[flag]
	return ok || s.File != nil && slices.ContainsFunc(s.File.Settings, func(set kubeproxyconfig.Setting) bool { return set.Flag == flag })
}
