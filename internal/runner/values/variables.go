// Package values reads what the spec of a Pod refers to: fields of the Pod, ConfigMaps, Secrets, tokens of service
// accounts, and $(NAME). From these it builds the variables of a container.
package values

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"
)

// Facts are the values that the downward API and a container's start need.
type Facts struct {
	Pod     *corev1.Pod
	IPs     []netip.Addr
	HostIPs []netip.Addr
	// Allocatable is what the node has of CPU and memory.
	Allocatable corev1.ResourceList
}

// Source reads ConfigMaps and Secrets of a pod's namespace, and its tokens.
type Source struct {
	Client    kubernetes.Interface
	Namespace string
	Tokens    *Tokens
}

// Data returns the keys of a ConfigMap or Secret; found is false if there is
// no such object.
func (s Source) Data(ctx context.Context, secret bool, name string) (data map[string][]byte, found bool, err error) {
	data = map[string][]byte{}
	if secret {
		o, err := s.Client.CoreV1().Secrets(s.Namespace).Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil, false, nil
		}
		if err != nil {
			return nil, false, fmt.Errorf("read Secret %s: %w", name, err)
		}
		return o.Data, true, nil
	}
	o, err := s.Client.CoreV1().ConfigMaps(s.Namespace).Get(ctx, name, metav1.GetOptions{})
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

// KindName is the kind of an object, Secret or ConfigMap.
func KindName(secret bool) string {
	if secret {
		return "Secret"
	}
	return "ConfigMap"
}

// Variables builds a container's environment in the order of kubelet: envFrom,
// env (later ones win, $(NAME) refers to earlier ones and to service
// variables), then the service variables that none of these overrides.
func Variables(ctx context.Context, f Facts, c *corev1.Container, services []corev1.EnvVar, from Source) ([]corev1.EnvVar, error) {
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
		value, ok, err := valueOf(ctx, f, c, e, from)
		if err != nil {
			return nil, fmt.Errorf("env %s: %w", e.Name, err)
		}
		if e.ValueFrom == nil {
			value = Expand(e.Value, lookup)
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

func envFrom(ctx context.Context, e corev1.EnvFromSource, from Source) ([]corev1.EnvVar, error) {
	name, optional, secret := "", false, false
	switch {
	case e.ConfigMapRef != nil:
		name, optional = e.ConfigMapRef.Name, ptr.Deref(e.ConfigMapRef.Optional, false)
	case e.SecretRef != nil:
		name, optional, secret = e.SecretRef.Name, ptr.Deref(e.SecretRef.Optional, false), true
	default:
		return nil, errors.New("envFrom: want configMapRef or secretRef")
	}
	data, found, err := from.Data(ctx, secret, name)
	if err != nil {
		return nil, err
	}
	if !found && !optional {
		return nil, fmt.Errorf("envFrom: %s %q does not exist in namespace %s", KindName(secret), name, from.Namespace)
	}
	var out []corev1.EnvVar
	for _, k := range slices.Sorted(maps.Keys(data)) {
		if !strings.ContainsAny(k, "=\x00") {
			out = append(out, corev1.EnvVar{Name: e.Prefix + k, Value: string(data[k])})
		}
	}
	return out, nil
}

// valueOf returns the value of a variable with valueFrom; ok is false when an
// optional key is absent.
func valueOf(ctx context.Context, f Facts, c *corev1.Container, e corev1.EnvVar, from Source) (value string, ok bool, err error) {
	v := e.ValueFrom
	key := func(secret bool, name, key string, optional *bool) (string, bool, error) {
		data, found, err := from.Data(ctx, secret, name)
		if err != nil {
			return "", false, err
		}
		b, has := data[key]
		switch {
		case has:
			return string(b), true, nil
		case ptr.Deref(optional, false):
			return "", false, nil
		case !found:
			return "", false, fmt.Errorf("%s %q does not exist in namespace %s", KindName(secret), name, from.Namespace)
		}
		return "", false, fmt.Errorf("%s %q has no key %q", KindName(secret), name, key)
	}
	switch {
	case v == nil:
		return "", true, nil
	case v.FieldRef != nil:
		value, err := Field(f, v.FieldRef.FieldPath)
		return value, true, err
	case v.ResourceFieldRef != nil:
		value, err := Resource(f, c, v.ResourceFieldRef)
		return value, true, err
	case v.ConfigMapKeyRef != nil:
		return key(false, v.ConfigMapKeyRef.Name, v.ConfigMapKeyRef.Key, v.ConfigMapKeyRef.Optional)
	case v.SecretKeyRef != nil:
		return key(true, v.SecretKeyRef.Name, v.SecretKeyRef.Key, v.SecretKeyRef.Optional)
	}
	return "", false, errors.New("valueFrom: want fieldRef, resourceFieldRef, configMapKeyRef or secretKeyRef; others are not supported")
}

// Field returns the value of a downward API path.
func Field(f Facts, path string) (string, error) {
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
			return f.Pod.Labels[key], nil
		case "metadata.annotations":
			return f.Pod.Annotations[key], nil
		}
	}
	switch path {
	case "metadata.name":
		return f.Pod.Name, nil
	case "metadata.namespace":
		return f.Pod.Namespace, nil
	case "metadata.uid":
		return string(f.Pod.UID), nil
	case "metadata.labels":
		return quoted(f.Pod.Labels), nil
	case "metadata.annotations":
		return quoted(f.Pod.Annotations), nil
	case "spec.nodeName":
		return f.Pod.Spec.NodeName, nil
	case "spec.serviceAccountName":
		return f.Pod.Spec.ServiceAccountName, nil
	case "status.podIP":
		return first(f.IPs), nil
	case "status.podIPs":
		return join(f.IPs), nil
	case "status.hostIP":
		return first(f.HostIPs), nil
	case "status.hostIPs":
		return join(f.HostIPs), nil
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
	for _, k := range slices.Sorted(maps.Keys(m)) {
		lines = append(lines, fmt.Sprintf("%s=%q", k, m[k]))
	}
	return strings.Join(lines, "\n")
}
