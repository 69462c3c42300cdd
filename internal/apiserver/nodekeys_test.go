package apiserver_test

import (
	"encoding/base64"
	"encoding/json"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/apiserver/join"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed/etcd"
)

const keyPath = "metadata.annotations[" + svc.PublicKeyAnnotation + "]"

// key is the i-th public key of WireGuard.
func key(i byte) string {
	b := make([]byte, 32)
	b[0], b[31] = 0xfb, i // '+' and '/' in base64
	return base64.StdEncoding.EncodeToString(b)
}

func nodeWith(name, key string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{svc.PublicKeyAnnotation: key}}}
}

func annotated(t *testing.T, key string) []byte {
	t.Helper()
	b, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]string{svc.PublicKeyAnnotation: key}}})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// A thief with the certificate of a node writes the public key of a younger node, which every
// node can read, on its own Node, in all ways that there are; other nodes, which believe the
// older of two with one key, would cut the younger one off.
func TestKeyOfAnotherNode(t *testing.T) {
	t.Parallel()
	s := apiservertest.StartServer(t)
	all := kubernetes.NewForConfigOrDie(s.LoopbackConfig())
	admin := all.CoreV1().Nodes()
	as := func(name string) *kubernetes.Clientset {
		return kubernetes.NewForConfigOrDie(joined(t, s, name, t.TempDir()).Config())
	}
	machine := as("victim")
	thief, victim := as("thief").CoreV1().Nodes(), machine.CoreV1().Nodes()
	ctx := t.Context()
	if _, err := thief.Create(ctx, nodeWith("thief", key(1)), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := victim.Create(ctx, nodeWith("victim", key(2)), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	writes := keyWrites(t, thief, as("new").CoreV1().Nodes())
	// Bits of the last character that stand for none, and what base64 skips.
	sloppy := strings.TrimSuffix(key(2), "=")
	sloppy = sloppy[:42] + string(sloppy[42]+1) + "="
	for _, stolen := range []string{key(2), sloppy, key(2)[:20] + "\n" + key(2)[20:]} {
		for what, write := range writes {
			err := write(stolen)
			invalidAt(t, err, keyPath)
			if err == nil || !strings.Contains(err.Error(), `is the key of node "victim"`) {
				t.Errorf("%s with %q: %v", what, stolen, err)
			}
		}
	}
	for _, wrong := range []string{"none", base64.StdEncoding.EncodeToString(make([]byte, 32)), key(3)[:40]} {
		_, err := thief.Patch(ctx, "thief", types.MergePatchType, annotated(t, wrong), metav1.PatchOptions{})
		invalidAt(t, err, keyPath)
	}

	identity := identityOf(t, machine)
	// A Node that is deleted has its key again, and the thief does not get it meanwhile.
	if err := admin.Delete(ctx, "victim", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	for what, write := range writes {
		if err := write(key(2)); !apierrors.IsInvalid(err) {
			t.Errorf("%s with the key of a deleted Node: %v", what, err)
		}
	}
	record := join.RemovedName("victim", identity)
	if err := all.CoreV1().ConfigMaps(join.RemovedNamespace).Delete(ctx, record, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a deleted Node that is admitted registers again", func() bool {
		_, err := victim.Create(ctx, nodeWith("victim", key(2)), metav1.CreateOptions{})
		return err == nil
	})
	if err := writes["merge patch"](key(2)); !apierrors.IsInvalid(err) {
		t.Errorf("the key of a Node that has registered again: %v", err)
	}
	testKeysThatAreFree(t, thief, victim)
}

// testKeysThatAreFree checks that a node may have what no Node has any more, or has asked
// for in vain.
func testKeysThatAreFree(t *testing.T, one, other corev1client.NodeInterface) {
	ctx := t.Context()
	stale := nodeWith("thief", key(4))
	stale.ResourceVersion = "1"
	if _, err := one.Update(ctx, stale, metav1.UpdateOptions{}); !apierrors.IsConflict(err) {
		t.Errorf("a stale update: %v", err)
	}
	dry := metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}}
	if _, err := one.Patch(ctx, "thief", types.MergePatchType, annotated(t, key(4)), dry); err != nil {
		t.Errorf("a dry run with a key of its own: %v", err)
	}
	if _, err := one.Create(ctx, nodeWith("thief", key(4)), metav1.CreateOptions{}); !apierrors.IsAlreadyExists(err) {
		t.Errorf("a second creation: %v", err)
	}
	for _, k := range []string{key(4), key(5)} {
		if _, err := other.Patch(ctx, "victim", types.MergePatchType, annotated(t, k), metav1.PatchOptions{}); err != nil {
			t.Errorf("a key that no Node has: %v", err)
		}
	}
	if _, err := one.Patch(ctx, "thief", types.MergePatchType, annotated(t, key(4)), metav1.PatchOptions{}); err != nil {
		t.Errorf("a key that another Node has no more: %v", err)
	}
	none := []byte(`{"metadata":{"annotations":{"` + svc.PublicKeyAnnotation + `":null}}}`)
	if _, err := one.Patch(ctx, "thief", types.MergePatchType, none, metav1.PatchOptions{}); err != nil {
		t.Error(err)
	}
	if _, err := other.Patch(ctx, "victim", types.MergePatchType, annotated(t, key(4)), metav1.PatchOptions{}); err != nil {
		t.Errorf("a key that another Node has given up: %v", err)
	}
}

// keyWrites are the ways in which a node can write a key: on the Node thief, and with fresh,
// which has no Node yet, on a new one.
func keyWrites(t *testing.T, thief, fresh corev1client.NodeInterface) map[string]func(key string) error {
	ctx := t.Context()
	patch := func(kind types.PatchType, sub ...string) func(string) error {
		return func(key string) error {
			_, err := thief.Patch(ctx, "thief", kind, annotated(t, key), metav1.PatchOptions{}, sub...)
			return err
		}
	}
	put := func(update func(*corev1.Node) error) func(string) error {
		return func(key string) error {
			n, err := thief.Get(ctx, "thief", metav1.GetOptions{})
			if err != nil {
				return err
			}
			n.Annotations[svc.PublicKeyAnnotation] = key
			return update(n)
		}
	}
	return map[string]func(string) error{
		"creation": func(key string) error {
			_, err := fresh.Create(ctx, nodeWith("new", key), metav1.CreateOptions{})
			return err
		},
		"dry run": func(key string) error {
			_, err := fresh.Create(ctx, nodeWith("new", key), metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			return err
		},
		"merge patch":           patch(types.MergePatchType),
		"strategic merge patch": patch(types.StrategicMergePatchType),
		"patch of the status":   patch(types.MergePatchType, "status"),
		"update":                put(func(n *corev1.Node) error { _, err := thief.Update(ctx, n, metav1.UpdateOptions{}); return err }),
		"update of the status":  put(func(n *corev1.Node) error { _, err := thief.UpdateStatus(ctx, n, metav1.UpdateOptions{}); return err }),
		"apply": func(key string) error {
			n := nodeWith("thief", key)
			n.APIVersion, n.Kind = "v1", "Node"
			b, err := json.Marshal(n)
			if err != nil {
				return err
			}
			force := true
			_, err = thief.Patch(ctx, "thief", types.ApplyPatchType, b, metav1.PatchOptions{FieldManager: "t", Force: &force})
			return err
		},
	}
}

// Of nodes that write one key at a time, at two servers, one gets it.
func TestOneKeyAtTwoServers(t *testing.T) {
	t.Parallel()
	store := etcd.URL(etcd.Start(t))
	var servers []*apiserver.Server
	for _, advertise := range []string{"192.0.2.1", "192.0.2.2"} {
		servers = append(servers, apiservertest.StartServer(t, func(o *apiserver.Options) {
			o.Etcd.Servers = []string{store}
			o.AdvertiseAddress = netip.MustParseAddr(advertise)
			o.Log = slog.New(slog.DiscardHandler)
		}))
	}
	names := []string{"a", "b", "c", "d", "e", "f"}
	var writing sync.WaitGroup
	const rounds = 10
	for i, name := range names {
		nodes := kubernetes.NewForConfigOrDie(servers[i%2].LoopbackConfig()).CoreV1().Nodes()
		if _, err := nodes.Create(t.Context(), nodeWith(name, key(byte(100+i))), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for round := range rounds {
		for i, name := range names {
			nodes := kubernetes.NewForConfigOrDie(servers[i%2].LoopbackConfig()).CoreV1().Nodes()
			writing.Go(func() {
				_, err := nodes.Patch(t.Context(), name, types.MergePatchType, annotated(t, key(byte(round))), metav1.PatchOptions{})
				if err != nil && !apierrors.IsInvalid(err) {
					t.Errorf("node %s: %v", name, err)
				}
			})
		}
		writing.Wait()
		all, err := kubernetes.NewForConfigOrDie(servers[0].LoopbackConfig()).CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		var have []string
		for i := range all.Items {
			if all.Items[i].Annotations[svc.PublicKeyAnnotation] == key(byte(round)) {
				have = append(have, all.Items[i].Name)
			}
		}
		if len(have) != 1 {
			t.Errorf("round %d: nodes %v have the key", round, have)
		}
	}
}
