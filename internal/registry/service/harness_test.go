package service

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"go.etcd.io/etcd/server/v3/embed"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metainternal "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	genericrequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/generic"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	serverstorage "k8s.io/apiserver/pkg/server/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/klog/v2"

	"github.com/fairlead/fairlead/internal/registry/networking"
	"github.com/fairlead/fairlead/internal/registry/scheme"
	"github.com/fairlead/fairlead/internal/registry/service/allocator"
	"github.com/fairlead/fairlead/internal/registry/store"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed/etcd"
)

func TestMain(m *testing.M) {
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	os.Exit(m.Run())
}

// startEtcd runs its own etcd, reached through a socket, until the test
// ends.
func startEtcd(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "svc")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return etcd.URL(etcd.Start(t, func(c *embed.Config) {
		c.ListenClientUrls = []url.URL{{Scheme: "unix", Path: filepath.Join(dir, "s")}}
		c.UnsafeNoFsync = os.Getenv("FAIRLEAD_TEST_FSYNC") == ""
	}))
}

// backEnd is a RESTOptionsGetter on an etcd, with the defaults of Service.
type backEnd struct {
	config storagebackend.Config
	codecs serializer.CodecFactory
}

func newBackEnd(t testing.TB, endpoint string) backEnd {
	t.Helper()
	s := scheme.New()
	if err := AddToScheme(s); err != nil {
		t.Fatal(err)
	}
	c := storagebackend.NewDefaultConfig("/registry", nil)
	c.Transport.ServerList = []string{endpoint}
	return backEnd{*c, serializer.NewCodecFactory(s)}
}

func (b backEnd) GetRESTOptions(gr schema.GroupResource, _ runtime.Object) (generic.RESTOptions, error) {
	codec, versioner, err := serverstorage.NewStorageCodec(serverstorage.StorageCodecConfig{
		StorageMediaType: runtime.ContentTypeProtobuf, StorageSerializer: b.codecs,
		StorageVersion: schema.GroupVersion{Group: gr.Group, Version: "v1"},
		MemoryVersion:  schema.GroupVersion{Group: gr.Group, Version: runtime.APIVersionInternal},
		Config:         b.config,
	})
	if err != nil {
		return generic.RESTOptions{}, err
	}
	c := b.config.ForResource(gr)
	c.Codec, c.EncodeVersioner = codec, versioner
	return generic.RESTOptions{
		StorageConfig: c, Decorator: genericregistry.StorageWithCacher(), DeleteCollectionWorkers: 1,
		ResourcePrefix: gr.Resource, CountMetricPollPeriod: time.Minute,
	}, nil
}

// server is the storages of one server.
type server struct {
	Storage
	net   networking.Storage
	ports *store.REST
	t     testing.TB
	stop  func()
}

var (
	v4Range  = netip.MustParsePrefix("10.96.0.0/16")
	v6Range  = netip.MustParsePrefix("fd00:10:96::/112")
	allPorts = svc.PortRange{First: 30000, Last: 32767}
)

// newServer makes a server on an etcd that does not run.
func newServer(t testing.TB, endpoint string, change ...func(*Options)) *server {
	t.Helper()
	b := newBackEnd(t, endpoint)
	net, err := networking.NewStorage(b)
	if err != nil {
		t.Fatal(err)
	}
	o := Options{Options: allocator.Options{
		RESTOptions: b, ServiceCIDRs: []netip.Prefix{v4Range, v6Range}, NodePorts: allPorts, Networking: net,
		RepairPeriod: time.Hour, RangeDrain: time.Second,
		Log: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
	}}
	for _, f := range change {
		f(&o)
	}
	s, err := NewStorage(o)
	if err != nil {
		t.Fatal(err)
	}
	return &server{Storage: s, net: net, ports: nodePortClaims(t, b), t: t}
}

// nodePortClaims is a second storage of the node port claims; the allocator
// shows its own to no other.
func nodePortClaims(t testing.TB, b backEnd) *store.REST {
	t.Helper()
	s, err := store.New(store.Kind{
		Resource: schema.GroupResource{Group: coordinationv1.GroupName, Resource: "nodeports"}, Singular: "nodeport",
		New:      store.Empty[coordinationv1.Lease],
		NewList:  store.Empty[coordinationv1.LeaseList],
		Strategy: store.Rules[*coordinationv1.Lease]{ClusterScoped: true}.Strategy(),
	}, b)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// destroy closes the storages.
func (s *server) destroy() {
	s.Destroy()
	for _, st := range []rest.Storage{s.Service, s.ports, s.net.IPAddress, s.net.ServiceCIDR} {
		st.Destroy()
	}
}

// startServer runs a server on an etcd until the test ends or stop is called.
func startServer(t testing.TB, endpoint string, change ...func(*Options)) *server {
	t.Helper()
	s := newServer(t, endpoint, change...)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { s.Run(ctx, nil); close(done) }()
	s.stop = func() {
		cancel()
		<-done
		s.destroy()
		s.stop = func() {}
	}
	t.Cleanup(func() { s.stop() })
	// Watch caches that have just started do not answer lists yet.
	eventually(t, func() string {
		for _, store := range []rest.Lister{s.Service, s.net.IPAddress, s.ports} {
			if _, err := store.List(ctxIn(""), &metainternal.ListOptions{}); err != nil {
				return err.Error()
			}
		}
		probe := service("ready", ofType(corev1.ServiceTypeNodePort))
		SetDefaults(probe)
		if _, err := s.Service.Create(ctxIn("default"), probe, nil, &metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}); err != nil {
			return err.Error()
		}
		return ""
	})
	return s
}

func start(t testing.TB, change ...func(*Options)) *server {
	t.Helper()
	return startServer(t, startEtcd(t), change...)
}

func ctxIn(ns string) context.Context {
	return genericrequest.WithNamespace(context.Background(), ns)
}

// create sends a Service as a client would: with the static defaults.
func (s *server) create(in *corev1.Service) (*corev1.Service, error) {
	in = in.DeepCopy()
	SetDefaults(in)
	out, err := s.Service.Create(ctxIn(in.Namespace), in, rest.ValidateAllObjectFunc, &metav1.CreateOptions{})
	if err != nil {
		return nil, err
	}
	return out.(*corev1.Service), nil
}

func (s *server) mustCreate(in *corev1.Service) *corev1.Service {
	s.t.Helper()
	out, err := s.create(in)
	if err != nil {
		s.t.Fatalf("create %s: %v", in.Name, err)
	}
	return out
}

// update changes a stored Service by f, as a client's read, change, write does.
func (s *server) update(name string, f func(*corev1.Service)) (*corev1.Service, error) {
	cur := s.get(name)
	f(cur)
	SetDefaults(cur)
	return s.put(cur)
}

// put replaces a Service.
func (s *server) put(in *corev1.Service) (*corev1.Service, error) {
	out, _, err := s.Service.Update(ctxIn(in.Namespace), in.Name, rest.DefaultUpdatedObjectInfo(in),
		rest.ValidateAllObjectFunc, rest.ValidateAllObjectUpdateFunc, false, &metav1.UpdateOptions{})
	if err != nil {
		return nil, err
	}
	return out.(*corev1.Service), nil
}

func (s *server) get(name string) *corev1.Service {
	s.t.Helper()
	out, err := s.Service.Get(ctxIn("default"), name, &metav1.GetOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	return out.(*corev1.Service).DeepCopy()
}

func (s *server) delete(name string) {
	s.t.Helper()
	if _, _, err := s.Service.Delete(ctxIn("default"), name, rest.ValidateAllObjectFunc, &metav1.DeleteOptions{}); err != nil {
		s.t.Fatal(err)
	}
}

// claimed lists the claims of addresses and ports in the store itself.
func (s *server) claimed() []string {
	s.t.Helper()
	list := func(st *store.REST) (out runtime.Object) {
		eventually(s.t, func() string { // a watch cache that has just started rejects lists
			var err error
			if out, err = st.List(ctxIn(""), &metainternal.ListOptions{}); err != nil {
				return err.Error()
			}
			return ""
		})
		return out
	}
	var out []string
	for _, ip := range list(s.net.IPAddress).(*networkingv1.IPAddressList).Items {
		out = append(out, fmt.Sprintf("%s=%s/%s", ip.Name, ip.Spec.ParentRef.Namespace, ip.Spec.ParentRef.Name))
	}
	for _, port := range list(s.ports).(*coordinationv1.LeaseList).Items {
		out = append(out, fmt.Sprintf("%s=%s", port.Name, *port.Spec.HolderIdentity))
	}
	slices.Sort(out)
	return out
}

// claimIP claims an address for a Service as a server does.
func (s *server) claimIP(ip string, owner svc.Name) {
	s.t.Helper()
	if _, err := s.net.IPAddress.Create(ctxIn(""), addressClaim(ip, owner), rest.ValidateAllObjectFunc, &metav1.CreateOptions{}); err != nil {
		s.t.Fatal(err)
	}
}

func addressClaim(ip string, owner svc.Name) *networkingv1.IPAddress {
	return &networkingv1.IPAddress{
		ObjectMeta: metav1.ObjectMeta{Name: ip, Labels: map[string]string{
			networkingv1.LabelIPAddressFamily: string(familyOf(ip)), networkingv1.LabelManagedBy: networking.ManagedBy,
		}},
		Spec: networkingv1.IPAddressSpec{ParentRef: &networkingv1.ParentReference{
			Resource: "services", Namespace: owner.Namespace, Name: owner.Name,
		}},
	}
}

// claimPort claims a node port for a Service as a server does.
func (s *server) claimPort(port string, owner svc.Name) error {
	claim := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: port},
		Spec: coordinationv1.LeaseSpec{HolderIdentity: new(owner.String())}}
	_, err := s.ports.Create(ctxIn(""), claim, rest.ValidateAllObjectFunc, &metav1.CreateOptions{})
	return err
}

// wantClaims fails unless exactly these claims are in the store.
func (s *server) wantClaims(want ...string) {
	s.t.Helper()
	slices.Sort(want)
	if got := s.claimed(); !slices.Equal(got, want) {
		s.t.Errorf("claims are %v, want %v", got, want)
	}
}

// service returns a minimal Service changed by each of f.
func service(name string, f ...func(*corev1.Service)) *corev1.Service {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default"},
		Spec: corev1.ServiceSpec{
			Selector: map[string]string{"app": "MyApp"},
			Ports:    []corev1.ServicePort{{Port: 80}},
		},
	}
	for _, g := range f {
		g(s)
	}
	return s
}

func ofType(t corev1.ServiceType) func(*corev1.Service) {
	return func(s *corev1.Service) { s.Spec.Type = t }
}

// eventually waits until f returns an empty string.
func eventually(t testing.TB, f func() string) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for {
		why := f()
		if why == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(why)
		}
		time.Sleep(10 * time.Millisecond)
	}
}
