package apiserver

import (
	"context"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver/access"
	"github.com/fairlead/fairlead/internal/apiserver/admit"
	"github.com/fairlead/fairlead/internal/apiserver/join"
	"github.com/fairlead/fairlead/internal/apiserver/pki"
	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/svc"
)

// bootstrapRetry is the pause between two attempts to create an object that must exist, and
// bootstrapWarning the time after which a failure is logged.
const (
	bootstrapRetry   = 50 * time.Millisecond
	bootstrapWarning = 5 * time.Second
)

// addHooks creates the objects that must exist at the start; /readyz waits for them.
func (s *Server) addHooks(c *genericapiserver.Config, client kubernetes.Interface, e *endpointKeeper, g *access.Guard) error {
	steps := []struct {
		name string
		do   func(context.Context) error
	}{
		{"the namespaces", func(ctx context.Context) error { return ensureNamespaces(ctx, client) }},
		{"ConfigMap kube-public/" + join.ClusterConfigMap, func(ctx context.Context) error { return s.ensureCluster(ctx, client) }},
		{"the default roles", func(ctx context.Context) error { return g.EnsurePolicy(ctx, client) }},
		{"the join token", func(ctx context.Context) error { return s.ensureToken(ctx, client) }},
		{"Service default/kubernetes", func(ctx context.Context) error {
			return s.ensureService(ctx, client, kubernetesService(s.opts.ServiceCIDRs, s.opts.AdvertiseAddress, s.Port()))
		}},
		{"Service kube-system/kube-dns", func(ctx context.Context) error {
			return s.ensureService(ctx, client, dnsService(s.opts.ServiceCIDRs))
		}},
		{"the endpoints of default/kubernetes", e.join},
	}
	return c.AddPostStartHook("fairlead/bootstrap", func(h genericapiserver.PostStartHookContext) error {
		for _, step := range steps {
			if !s.untilDone(h, step.name, step.do) {
				return nil // the server stops: the hook has not failed
			}
		}
		return nil
	})
}

// untilDone repeats f until it succeeds, and reports false if ctx ends first. A
// failure that lasts is logged once.
func (s *Server) untilDone(ctx context.Context, what string, f func(context.Context) error) bool {
	warn := time.Now().Add(bootstrapWarning)
	for {
		err := f(ctx)
		if err == nil {
			return true
		}
		if now := time.Now(); !warn.IsZero() && now.After(warn) {
			s.log.Warn("cannot create an object of the system; retrying", "object", what, "err", err)
			warn = time.Time{}
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(bootstrapRetry):
		}
	}
}

func ensureNamespaces(ctx context.Context, client kubernetes.Interface) error {
	for _, name := range admit.SystemNamespaces() {
		ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
		_, err := client.CoreV1().Namespaces().Create(ctx, ns, metav1.CreateOptions{})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return err
		}
	}
	return nil
}

// ensureToken keeps the join token of the file node-token while it is valid and has the hash of
// the authority that signs. A new one
// is written to the file when servers know it.
func (s *Server) ensureToken(ctx context.Context, client kubernetes.Interface) error {
	secrets := client.CoreV1().Secrets(join.SecretNamespace)
	s.mu.Lock()
	defer s.mu.Unlock()
	signer := s.creds.PKI.Authority()
	if s.token.Hash == pki.Hash(signer) {
		secret, err := secrets.Get(ctx, join.SecretName(s.token.ID), metav1.GetOptions{})
		if err == nil {
			if l, err := join.List(secret); err == nil && !l.Expired(time.Now()) {
				if join.SetNodes(secret, s.opts.NodeTokenNodes) {
					_, err = secrets.Update(ctx, secret, metav1.UpdateOptions{})
				}
				return err
			}
		} else if !apierrors.IsNotFound(err) {
			return err
		}
	}
	t := join.New(signer)
	_, err := secrets.Create(ctx, t.Object(time.Now().Add(join.DefaultLife), s.opts.NodeTokenNodes, "made at the start of a server"),
		metav1.CreateOptions{})
	if err != nil {
		return err
	}
	s.token = t
	return fileio.Replace(s.TokenFile(), []byte(t.String()+"\n"), 0o600)
}

// ensureService creates want unless a Service of its name exists. An existing one
// is kept as it is: clients may know its address.
func (s *Server) ensureService(ctx context.Context, client kubernetes.Interface, want *corev1.Service) error {
	services := client.CoreV1().Services(want.Namespace)
	have, err := services.Get(ctx, want.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		_, err = services.Create(ctx, want, metav1.CreateOptions{})
		return err
	}
	if err != nil {
		return err
	}
	if have.Spec.ClusterIP != want.Spec.ClusterIPs[0] {
		s.log.Warn("a system Service has an address of another service range; keeping the current value, delete the Service to change it",
			"namespace", want.Namespace, "service", want.Name, "address", have.Spec.ClusterIP, "want", want.Spec.ClusterIPs[0])
	}
	return nil
}

// kubernetesService returns the Service by which Pods find the API: at the first
// address of the service range that has the family of endpoint, where the server is
// reached; of the first range if there is none. The other family would have no
// endpoints.
func kubernetesService(cidrs []netip.Prefix, endpoint netip.Addr, port uint16) *corev1.Service {
	i := max(0, slices.IndexFunc(cidrs, func(c netip.Prefix) bool { return endpoint.IsValid() && c.Addr().Is4() == endpoint.Is4() }))
	s := systemService(metav1.NamespaceDefault, svc.APIService, addressAt(cidrs[i:i+1], 1))
	s.Labels = map[string]string{"component": "apiserver", "provider": "kubernetes"}
	s.Spec.Ports = []corev1.ServicePort{{Name: "https", Port: 443, Protocol: corev1.ProtocolTCP, TargetPort: intstr.FromInt32(int32(port))}}
	return s
}

// dnsService returns the Service of the cluster's DNS: at the tenth address of each
// range. The nodes' DNS servers are its endpoints.
func dnsService(cidrs []netip.Prefix) *corev1.Service {
	s := systemService(metav1.NamespaceSystem, svc.DNSService, addressAt(cidrs, 10))
	s.Labels = map[string]string{"k8s-app": "kube-dns", "kubernetes.io/cluster-service": "true", "kubernetes.io/name": "CoreDNS"}
	s.Spec.Ports = []corev1.ServicePort{
		{Name: "dns", Port: 53, Protocol: corev1.ProtocolUDP, TargetPort: intstr.FromInt32(53)},
		{Name: "dns-tcp", Port: 53, Protocol: corev1.ProtocolTCP, TargetPort: intstr.FromInt32(53)},
	}
	return s
}

func systemService(namespace, name string, addrs []netip.Addr) *corev1.Service {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	policy := corev1.IPFamilyPolicySingleStack
	if len(addrs) > 1 {
		policy = corev1.IPFamilyPolicyRequireDualStack
	}
	s.Spec.Type, s.Spec.IPFamilyPolicy = corev1.ServiceTypeClusterIP, &policy
	for _, a := range addrs {
		s.Spec.ClusterIPs = append(s.Spec.ClusterIPs, a.String())
		family := corev1.IPv6Protocol
		if a.Is4() {
			family = corev1.IPv4Protocol
		}
		s.Spec.IPFamilies = append(s.Spec.IPFamilies, family)
	}
	s.Spec.ClusterIP = s.Spec.ClusterIPs[0]
	return s
}

// addressAt returns the n-th address of each range; the network address is the 0th.
func addressAt(cidrs []netip.Prefix, n int) []netip.Addr {
	out := make([]netip.Addr, len(cidrs))
	for i, c := range cidrs {
		out[i] = c.Addr()
		for range n {
			out[i] = out[i].Next()
		}
	}
	return out
}
