package apiserver

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver/join"
)

// ClusterConfigMap is the name of the ConfigMap in kube-public in which a server
// publishes its Cluster. Every node may read it.
const ClusterConfigMap = join.ClusterConfigMap

// Cluster is what nodes must have in common with their server.
type Cluster struct {
	PodCIDRs, ServiceCIDRs []netip.Prefix
	// DNS are the ClusterIPs of kube-dns, and Domains the domains of the cluster's names,
	// the first of which PTR records have.
	DNS     []netip.Addr
	Domains []string
}

// keyAuthorities is the key of the trusted authorities (pki.Bundle.Published), which nodes follow while they run.
const keyAuthorities = join.AuthoritiesKey

// The keys of the ConfigMap; for ranges and domains they are the flags' names.
const (
	keyPodCIDRs     = "cluster-cidr"
	keyServiceCIDRs = "service-cluster-ip-range"
	keyDNS          = "cluster-dns"
	keyDomains      = "cluster-domain"
)

func (c Cluster) data() map[string]string {
	return map[string]string{
		keyPodCIDRs: joined(c.PodCIDRs), keyServiceCIDRs: joined(c.ServiceCIDRs), keyDNS: joined(c.DNS), keyDomains: strings.Join(c.Domains, ","),
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
	read(keyPodCIDRs, prefix(&c.PodCIDRs))
	read(keyServiceCIDRs, prefix(&c.ServiceCIDRs))
	read(keyDNS, func(s string) error {
		a, err := netip.ParseAddr(s)
		c.DNS = append(c.DNS, a)
		return err
	})
	read(keyDomains, func(s string) error {
		c.Domains = append(c.Domains, s)
		return nil
	})
	return c, err
}

// ensureCluster publishes what nodes must have in common with this server. All servers do, at every step of a rotation.
func (s *Server) ensureCluster(ctx context.Context, client kubernetes.Interface) error {
	return contended(ctx, func() error { return s.putCluster(ctx, client) })
}

func (s *Server) putCluster(ctx context.Context, client kubernetes.Interface) error {
	data := Cluster{s.opts.PodCIDRs, s.opts.ServiceCIDRs, addressAt(s.opts.ServiceCIDRs, 10), s.opts.Domains}.data()
	maps.DeleteFunc(data, func(_, v string) bool { return v == "" })
	all := client.CoreV1().ConfigMaps(metav1.NamespacePublic)
	published := string(s.creds.PKI.Bundle().Published())
	have, err := all.Get(ctx, ClusterConfigMap, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespacePublic, Name: ClusterConfigMap}, Data: data}
		m.Data[keyAuthorities] = published
		_, err = all.Create(ctx, m, metav1.CreateOptions{})
		return err
	}
	if err != nil {
		return err
	}
	before := maps.Clone(have.Data)
	delete(before, keyAuthorities)
	if changed := !maps.Equal(before, data); changed {
		s.log.Warn("the cluster's ranges or domains have changed; agents use the new ones when they start again", "before", before, "now", data)
	} else if have.Data[keyAuthorities] == published {
		return nil
	}
	have.Data = data
	have.Data[keyAuthorities] = published
	_, err = all.Update(ctx, have, metav1.UpdateOptions{})
	return err
}
