package join

import (
	"context"
	"fmt"
	"net/netip"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	baseversion "k8s.io/component-base/version"
)

const (
	// KubernetesVersion is the release whose API is served: that of the libraries, whose feature gates have its defaults.
	KubernetesVersion = baseversion.DefaultKubeBinaryVersion
	// Version is the version that servers and nodes report by default: the Kubernetes
	// release whose API is served, and the name of the product.
	Version = "v" + KubernetesVersion + ".0+fairlead"
)

// DefaultServiceCIDRs returns the default service ranges.
func DefaultServiceCIDRs() []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:10:96::/112")}
}

// Cluster is what nodes must have in common with their server, which publishes it in ClusterConfigMap.
type Cluster struct {
	PodCIDRs, ServiceCIDRs []netip.Prefix
	// DNS are the ClusterIPs of kube-dns, and Domains the domains of the cluster's names,
	// the first of which PTR records have.
	DNS     []netip.Addr
	Domains []string
}

// The keys of the ConfigMap; for ranges and domains they are the flags' names.
const (
	KeyPodCIDRs     = "cluster-cidr"
	KeyServiceCIDRs = "service-cluster-ip-range"
	keyDNS          = "cluster-dns"
	KeyDomains      = "cluster-domain"
)

// Data returns the data of the ConfigMap without AuthoritiesKey. Lists without elements are empty strings.
func (c Cluster) Data() map[string]string {
	return map[string]string{
		KeyPodCIDRs: joined(c.PodCIDRs), KeyServiceCIDRs: joined(c.ServiceCIDRs), keyDNS: joined(c.DNS), KeyDomains: strings.Join(c.Domains, ","),
	}
}

func joined[T fmt.Stringer](list []T) string {
	var out []string
	for _, v := range list {
		out = append(out, v.String())
	}
	return strings.Join(out, ",")
}

// ReadCluster returns what the server behind client has published. The error of a server
// that publishes nothing is IsNotFound of k8s.io/apimachinery/pkg/api/errors.
func ReadCluster(ctx context.Context, client kubernetes.Interface) (Cluster, error) {
	var c Cluster
	m, err := client.CoreV1().ConfigMaps(metav1.NamespacePublic).Get(ctx, ClusterConfigMap, metav1.GetOptions{})
	if err != nil {
		return c, err
	}
	read := func(key string, add func(string) error) {
		for part := range strings.SplitSeq(m.Data[key], ",") {
			if part = strings.TrimSpace(part); part == "" || err != nil {
				continue
			}
			if bad := add(part); bad != nil {
				err = fmt.Errorf("ConfigMap %s/%s: %s: %w", m.Namespace, m.Name, key, bad)
			}
		}
	}
	prefix := func(to *[]netip.Prefix) func(string) error {
		return func(s string) error {
			p, err := netip.ParsePrefix(s)
			*to = append(*to, p)
			return err
		}
	}
	read(KeyPodCIDRs, prefix(&c.PodCIDRs))
	read(KeyServiceCIDRs, prefix(&c.ServiceCIDRs))
	read(keyDNS, func(s string) error {
		a, err := netip.ParseAddr(s)
		c.DNS = append(c.DNS, a)
		return err
	})
	read(KeyDomains, func(s string) error {
		c.Domains = append(c.Domains, s)
		return nil
	})
	return c, err
}
