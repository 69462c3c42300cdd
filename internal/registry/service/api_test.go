package service_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
)

// manifest is the example of the documents (behaviour 15).
const manifest = `
apiVersion: v1
kind: Service
metadata: {name: my-service}
spec:
  selector: {app: MyApp}
  ports:
  - {protocol: TCP, port: 80, targetPort: 9376}
`

func decode(t *testing.T, text string) *corev1.Service {
	t.Helper()
	var s corev1.Service
	if err := yaml.UnmarshalStrict([]byte(text), &s); err != nil {
		t.Fatal(err)
	}
	return &s
}

// Through the whole server: defaults, errors as a client sees them, server-side
// apply, patches, status, tables.
func TestThroughTheServer(t *testing.T) {
	config := apiservertest.Start(t)
	var warned []string
	config = rest.CopyConfig(config)
	config.WarningHandler = warningFunc(func(text string) { warned = append(warned, text) })
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	api := client.CoreV1().Services("default")

	made, err := api.Create(ctx, decode(t, manifest), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if made.Spec.ClusterIP == "" || made.Spec.Type != "ClusterIP" || made.Spec.SessionAffinity != "None" ||
		made.Spec.Ports[0].TargetPort.IntVal != 9376 || *made.Spec.InternalTrafficPolicy != "Cluster" || made.Spec.Selector["app"] != "MyApp" {
		t.Errorf("created %+v", made.Spec)
	}
	ip, err := client.NetworkingV1().IPAddresses().Get(ctx, made.Spec.ClusterIP, metav1.GetOptions{})
	if err != nil || ip.Spec.ParentRef.Name != "my-service" || ip.Spec.ParentRef.Resource != "services" {
		t.Errorf("IPAddress %v, %v", ip, err)
	}
	cidr, err := client.NetworkingV1().ServiceCIDRs().Get(ctx, "kubernetes", metav1.GetOptions{})
	if err != nil || len(cidr.Status.Conditions) != 1 || cidr.Status.Conditions[0].Status != metav1.ConditionTrue {
		t.Errorf("ServiceCIDR %v, %v", cidr, err)
	}

	// Applying the manifest again and again changes nothing.
	apply := func(text string) *corev1.Service {
		t.Helper()
		out, err := api.Patch(ctx, "my-service", types.ApplyPatchType, []byte(text), metav1.PatchOptions{FieldManager: "test", Force: new(true)})
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	a := apply(manifest)
	if b := apply(manifest); a.ResourceVersion != b.ResourceVersion || b.Spec.ClusterIP != made.Spec.ClusterIP {
		t.Errorf("apply is not a no-op: %s, %s", a.ResourceVersion, b.ResourceVersion)
	}

	// A patch to another type, as the documents have it, and back.
	out, err := api.Patch(ctx, "my-service", types.StrategicMergePatchType, []byte(`{"spec":{"type":"NodePort"}}`), metav1.PatchOptions{})
	if err != nil || out.Spec.Ports[0].NodePort < 30000 {
		t.Fatal(err, out)
	}
	out, err = api.Patch(ctx, "my-service", types.MergePatchType,
		[]byte(`{"spec":{"type":"ExternalName","externalName":"db.example.com","clusterIP":""}}`), metav1.PatchOptions{})
	if err != nil || out.Spec.ClusterIP != "" || out.Spec.Ports[0].NodePort != 0 {
		t.Fatal(err, out)
	}
	if _, err := client.NetworkingV1().IPAddresses().Get(ctx, made.Spec.ClusterIP, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("the address is still claimed: %v", err)
	}

	// 422 with the cause (behaviour 66).
	bad := decode(t, manifest)
	bad.Name, bad.Spec.ClusterIP = "bad", "1.2.3"
	_, err = api.Create(ctx, bad, metav1.CreateOptions{})
	status, ok := err.(apierrors.APIStatus)
	if !ok || status.Status().Code != http.StatusUnprocessableEntity || status.Status().Details.Causes[0].Field != "spec.clusterIPs[0]" {
		t.Errorf("bad cluster IP: %v", err)
	}

	// Warnings.
	warned = nil
	odd := decode(t, manifest)
	odd.Name, odd.Spec.ExternalName = "odd", "a.b"
	if _, err := api.Create(ctx, odd, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if len(warned) != 1 || !strings.Contains(warned[0], "spec.externalName is ignored") {
		t.Errorf("warnings %q", warned)
	}

	// Status through its own path only.
	lb := decode(t, manifest)
	lb.Name, lb.Spec.Type = "lb", "LoadBalancer"
	lb.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.127"}}
	lb, err = api.Create(ctx, lb, metav1.CreateOptions{})
	if err != nil || len(lb.Status.LoadBalancer.Ingress) != 0 {
		t.Fatal(err, lb)
	}
	lb.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.127"}}
	lb, err = api.UpdateStatus(ctx, lb, metav1.UpdateOptions{})
	if err != nil || *lb.Status.LoadBalancer.Ingress[0].IPMode != "VIP" {
		t.Fatal(err, lb)
	}

	table(t, client, "/api/v1/namespaces/default/services", "Name,Type,Cluster-IP,External-IP,Port(s),Age,Selector")
	table(t, client, "/api/v1/namespaces/default/endpoints", "Name,Endpoints,Age")
	table(t, client, "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices", "Name,AddressType,Ports,Endpoints,Age")
	table(t, client, "/apis/networking.k8s.io/v1/ipaddresses", "Name,ParentRef")
	table(t, client, "/apis/networking.k8s.io/v1/servicecidrs", "Name,CIDRs,Age")

	// Selectors on fields.
	list, err := api.List(ctx, metav1.ListOptions{FieldSelector: "spec.type=LoadBalancer"})
	if err != nil || len(list.Items) != 1 || list.Items[0].Name != "lb" {
		t.Errorf("by type: %v, %v", list, err)
	}

	// Deleting many frees all.
	if err := client.CoreV1().RESTClient().Delete().Namespace("default").Resource("services").
		Param("fieldSelector", "metadata.name!=kubernetes").Do(ctx).Error(); err != nil {
		t.Error(err)
	}
	ips, err := client.NetworkingV1().IPAddresses().List(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, ip := range ips.Items {
		if ref := ip.Spec.ParentRef; ref.Namespace == "default" && ref.Name != "kubernetes" {
			t.Errorf("%s is still claimed for %s", ip.Name, ref.Name)
		}
	}
}

type warningFunc func(string)

func (f warningFunc) HandleWarningHeader(_ int, _ string, text string) { f(text) }

func table(t *testing.T, client kubernetes.Interface, path, want string) {
	t.Helper()
	b, err := client.CoreV1().RESTClient().Get().AbsPath(path).
		SetHeader("Accept", "application/json;as=Table;v=v1;g=meta.k8s.io").DoRaw(context.Background())
	if err != nil {
		t.Error(path, err)
		return
	}
	var tab metav1.Table
	if err := json.Unmarshal(b, &tab); err != nil {
		t.Error(err)
	}
	var names []string
	for _, c := range tab.ColumnDefinitions {
		names = append(names, c.Name)
	}
	if got := strings.Join(names, ","); got != want {
		t.Errorf("%s: columns %s, want %s", path, got, want)
	}
	for _, r := range tab.Rows {
		if len(r.Cells) != len(names) {
			t.Errorf("%s: row %s", path, fmt.Sprint(r.Cells...))
		}
	}
}

// A Service that etcd does not take says so, and leaves no claim behind.
func TestServiceTooLargeForEtcd(t *testing.T) {
	config := rest.CopyConfig(apiservertest.Start(t))
	config.ContentType = "application/vnd.kubernetes.protobuf"
	client := kubernetes.NewForConfigOrDie(config)
	s := decode(t, manifest)
	s.Spec.ClusterIP, s.Spec.Selector = "10.96.7.7", map[string]string{}
	for i := range 5000 { // 1.6 MB; etcd takes 1.5 MiB
		s.Spec.Selector[fmt.Sprintf("%sexample.com/k%d", strings.Repeat("abcdefghi.", 23), i)] = strings.Repeat("v", 63)
	}
	_, err := client.CoreV1().Services("default").Create(t.Context(), s, metav1.CreateOptions{})
	if err == nil || !strings.Contains(err.Error(), "too large") {
		t.Errorf("created or answered %.300v", err)
	}
	if _, err := client.NetworkingV1().IPAddresses().Get(t.Context(), "10.96.7.7", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("the address is still claimed: %v", err)
	}
	s.Spec.Selector = nil
	if _, err := client.CoreV1().Services("default").Create(t.Context(), s, metav1.CreateOptions{}); err != nil {
		t.Error(err)
	}
}
