package pod

import (
	"fmt"
	"net/url"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/conversion"
	"k8s.io/apimachinery/pkg/runtime"
)

// addOptions lets the options of log, exec, attach and portforward be read
// from the query of a URL.
func addOptions(s *runtime.Scheme) error {
	for _, c := range []struct {
		options runtime.Object
		fill    func(q *query, into any)
	}{
		{&corev1.PodLogOptions{}, func(q *query, into any) { q.log(into.(*corev1.PodLogOptions)) }},
		{&corev1.PodExecOptions{}, func(q *query, into any) {
			o := into.(*corev1.PodExecOptions)
			o.Stdin, o.Stdout, o.Stderr, o.TTY = q.bool("stdin"), q.bool("stdout"), q.bool("stderr"), q.bool("tty")
			o.Container, o.Command = q.values.Get("container"), q.values["command"]
		}},
		{&corev1.PodAttachOptions{}, func(q *query, into any) {
			o := into.(*corev1.PodAttachOptions)
			o.Stdin, o.Stdout, o.Stderr, o.TTY = q.bool("stdin"), q.bool("stdout"), q.bool("stderr"), q.bool("tty")
			o.Container = q.values.Get("container")
		}},
		{&corev1.PodPortForwardOptions{}, func(q *query, into any) {
			for _, p := range q.values["ports"] {
				n, err := strconv.ParseUint(p, 10, 16)
				if err != nil && q.err == nil {
					q.err = fmt.Errorf("ports: %q is not a port", p)
				}
				o := into.(*corev1.PodPortForwardOptions)
				o.Ports = append(o.Ports, int32(n))
			}
		}},
	} {
		err := s.AddConversionFunc((*url.Values)(nil), c.options, func(a, b any, _ conversion.Scope) error {
			q := &query{values: *a.(*url.Values)}
			c.fill(q, b)
			return q.err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// query reads typed values and keeps the first error.
type query struct {
	values url.Values
	err    error
}

// bool is true for a key that is there with no value or any but "false" and
// "0", as everywhere in the Kubernetes API.
func (q *query) bool(key string) bool {
	if _, ok := q.values[key]; !ok {
		return false
	}
	v := q.values.Get(key)
	return v != "false" && v != "0"
}

func (q *query) int(key string) *int64 {
	v := q.values.Get(key)
	if v == "" {
		return nil
	}
	n, err := strconv.ParseInt(v, 10, 64)
	if err != nil {
		if q.err == nil {
			q.err = fmt.Errorf("%s: %q is not a number", key, v)
		}
		return nil
	}
	return &n
}

func (q *query) log(o *corev1.PodLogOptions) {
	o.Container = q.values.Get("container")
	o.Follow, o.Previous, o.Timestamps = q.bool("follow"), q.bool("previous"), q.bool("timestamps")
	o.InsecureSkipTLSVerifyBackend = q.bool("insecureSkipTLSVerifyBackend")
	o.SinceSeconds, o.TailLines, o.LimitBytes = q.int("sinceSeconds"), q.int("tailLines"), q.int("limitBytes")
	if v := q.values.Get("sinceTime"); v != "" {
		t, err := time.Parse(time.RFC3339, v)
		if err != nil && q.err == nil {
			q.err = fmt.Errorf("sinceTime: %q is not a time like 2006-01-02T15:04:05Z", v)
		}
		o.SinceTime = &metav1.Time{Time: t}
	}
	if v := q.values.Get("stream"); v != "" {
		o.Stream = &v
	}
}
