package values

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
)

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
	f := Facts{Pod: pod, IPs: []netip.Addr{netip.MustParseAddr("10.1.1.2"), netip.MustParseAddr("fd00::2")},
		HostIPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}}
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
	got, err := Variables(t.Context(), f, c, services, Source{Client: client, Namespace: "shop"})
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
		"others are not supported": {FileKeyRef: &corev1.FileKeySelector{VolumeName: "v", Path: "env", Key: "k"}},
	} {
		_, err := Variables(t.Context(), f, &corev1.Container{Env: []corev1.EnvVar{{Name: "X", ValueFrom: bad}}}, nil,
			Source{Client: client, Namespace: "shop"})
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("error %v, want %q", err, name)
		}
	}
}
