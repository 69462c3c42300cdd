package runner

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// facts are the values that the downward API and a container's start need.
type facts struct {
	pod     *corev1.Pod
	ips     []netip.Addr
	hostIPs []netip.Addr
}

// source reads ConfigMaps and Secrets of a pod's namespace, and its tokens.
type source struct {
	client    kubernetes.Interface
	namespace string
	tokens    *tokens
	owner     owner // of the volumes that are written
}

// data returns the keys of a ConfigMap or Secret; found is false if there is
// no such object.
func (s source) data(ctx context.Context, secret bool, name string) (data map[string][]byte, found bool, err error) {
	data = map[string][]byte{}
	if secret {
		o, err := s.client.CoreV1().Secrets(s.namespace).Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil, false, nil
		}
		if err != nil {
			return nil, false, fmt.Errorf("read Secret %s: %w", name, err)
		}
		return o.Data, true, nil
	}
	o, err := s.client.CoreV1().ConfigMaps(s.namespace).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, fmt.Errorf("read ConfigMap %s: %w", name, err)
	}
	for k, v := range o.BinaryData {
		data[k] = v
	}
	for k, v := range o.Data {
		data[k] = []byte(v)
	}
	return data, true, nil
}

func kindName(secret bool) string {
	if secret {
		return "Secret"
	}
	return "ConfigMap"
}

// variables builds a container's environment in the order of kubelet: envFrom,
// env (later ones win, $(NAME) refers to earlier ones and to service
// variables), then the service variables that none of these overrides.
func variables(ctx context.Context, f facts, c *corev1.Container, services []corev1.EnvVar, from source) ([]corev1.EnvVar, error) {
	var out []corev1.EnvVar
	set := func(name, value string) {
		if i := slices.IndexFunc(out, func(e corev1.EnvVar) bool { return e.Name == name }); i >= 0 {
			out[i].Value = value
			return
		}
		out = append(out, corev1.EnvVar{Name: name, Value: value})
	}
	lookup := func(name string) (string, bool) {
		for _, list := range [][]corev1.EnvVar{out, services} {
			for _, e := range list {
				if e.Name == name {
					return e.Value, true
				}
			}
		}
		return "", false
	}
	for _, e := range c.EnvFrom {
		data, err := envFrom(ctx, e, from)
		if err != nil {
			return nil, err
		}
		for _, kv := range data {
			set(kv.Name, kv.Value)
		}
	}
	for _, e := range c.Env {
		value, ok, err := valueOf(ctx, f, e, from)
		if err != nil {
			return nil, fmt.Errorf("env %s: %w", e.Name, err)
		}
		if e.ValueFrom == nil {
			value = expand(e.Value, lookup)
		}
		if ok {
			set(e.Name, value)
		}
	}
	for _, s := range services {
		if !slices.ContainsFunc(out, func(e corev1.EnvVar) bool { return e.Name == s.Name }) {
			out = append(out, s)
		}
	}
	return out, nil
}

func envFrom(ctx context.Context, e corev1.EnvFromSource, from source) ([]corev1.EnvVar, error) {
	name, optional, secret := "", false, false
	switch {
	case e.ConfigMapRef != nil:
		name, optional = e.ConfigMapRef.Name, isTrue(e.ConfigMapRef.Optional)
	case e.SecretRef != nil:
		name, optional, secret = e.SecretRef.Name, isTrue(e.SecretRef.Optional), true
	default:
		return nil, errors.New("envFrom: want configMapRef or secretRef")
	}
	data, found, err := from.data(ctx, secret, name)
	if err != nil {
		return nil, err
	}
	if !found && !optional {
		return nil, fmt.Errorf("envFrom: %s %q does not exist in namespace %s", kindName(secret), name, from.namespace)
	}
	var out []corev1.EnvVar
	for _, k := range sortedKeys(data) {
		if !strings.ContainsAny(k, "=\x00") {
			out = append(out, corev1.EnvVar{Name: e.Prefix + k, Value: string(data[k])})
		}
	}
	return out, nil
}

// valueOf returns the value of a variable with valueFrom; ok is false when an
// optional key is absent.
func valueOf(ctx context.Context, f facts, e corev1.EnvVar, from source) (value string, ok bool, err error) {
	v := e.ValueFrom
	key := func(secret bool, name, key string, optional *bool) (string, bool, error) {
		data, found, err := from.data(ctx, secret, name)
		if err != nil {
			return "", false, err
		}
		b, has := data[key]
		switch {
		case has:
			return string(b), true, nil
		case isTrue(optional):
			return "", false, nil
		case !found:
			return "", false, fmt.Errorf("%s %q does not exist in namespace %s", kindName(secret), name, from.namespace)
		}
		return "", false, fmt.Errorf("%s %q has no key %q", kindName(secret), name, key)
	}
	switch {
	case v == nil:
		return "", true, nil
	case v.FieldRef != nil:
		value, err := field(f, v.FieldRef.FieldPath)
		return value, true, err
	case v.ConfigMapKeyRef != nil:
		return key(false, v.ConfigMapKeyRef.Name, v.ConfigMapKeyRef.Key, v.ConfigMapKeyRef.Optional)
	case v.SecretKeyRef != nil:
		return key(true, v.SecretKeyRef.Name, v.SecretKeyRef.Key, v.SecretKeyRef.Optional)
	}
	return "", false, errors.New("valueFrom: want fieldRef, configMapKeyRef or secretKeyRef; others are not supported")
}

// field returns the value of a downward API path.
func field(f facts, path string) (string, error) {
	join := func(addrs []netip.Addr) string {
		var s []string
		for _, a := range addrs {
			s = append(s, a.String())
		}
		return strings.Join(s, ",")
	}
	first := func(addrs []netip.Addr) string { return join(addrs[:min(1, len(addrs))]) }
	if name, key, ok := subscript(path); ok {
		switch name {
		case "metadata.labels":
			return f.pod.Labels[key], nil
		case "metadata.annotations":
			return f.pod.Annotations[key], nil
		}
	}
	switch path {
	case "metadata.name":
		return f.pod.Name, nil
	case "metadata.namespace":
		return f.pod.Namespace, nil
	case "metadata.uid":
		return string(f.pod.UID), nil
	case "metadata.labels":
		return quoted(f.pod.Labels), nil
	case "metadata.annotations":
		return quoted(f.pod.Annotations), nil
	case "spec.nodeName":
		return f.pod.Spec.NodeName, nil
	case "spec.serviceAccountName":
		return f.pod.Spec.ServiceAccountName, nil
	case "status.podIP":
		return first(f.ips), nil
	case "status.podIPs":
		return join(f.ips), nil
	case "status.hostIP":
		return first(f.hostIPs), nil
	case "status.hostIPs":
		return join(f.hostIPs), nil
	}
	return "", fmt.Errorf("fieldPath %q is not supported: want metadata.name, .namespace, .uid, .labels['KEY'], .annotations['KEY'], "+
		"spec.nodeName, spec.serviceAccountName, status.podIP, .podIPs, .hostIP or .hostIPs", path)
}

// subscript splits path['key'].
func subscript(path string) (name, key string, ok bool) {
	name, rest, ok := strings.Cut(path, "['")
	if !ok {
		return "", "", false
	}
	key, ok = strings.CutSuffix(rest, "']")
	return name, key, ok
}

// quoted is the form of a whole map in a downward API file: key="value" lines.
func quoted(m map[string]string) string {
	var lines []string
	for _, k := range sortedKeys(m) {
		lines = append(lines, fmt.Sprintf("%s=%q", k, m[k]))
	}
	return strings.Join(lines, "\n")
}

func sortedKeys[V any](m map[string]V) []string {
	out := make([]string, 0, len(m))
	for k := range m {
		out = append(out, k)
	}
	slices.Sort(out)
	return out
}

func isTrue(b *bool) bool { return b != nil && *b }
