package lb

import (
	"fmt"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/lb/logship"
	"github.com/fairlead/fairlead/internal/svc"
)

// LogUpload is where access logs are uploaded to. The buckets, and the credentials for them, are of the Services'
// namespaces.
type LogUpload struct {
	Endpoint logship.Endpoint
	// Keep is true if files stay in the directory when they are stored.
	Keep bool
}

// LogSecretType is the type of the Secrets that have credentials for buckets, so that no other Secret is taken for one.
const LogSecretType = "fairlead.dev/s3-credentials"

// The entries of such a Secret.
const (
	accessKeyEntry = "access-key-id"
	secretKeyEntry = "secret-access-key"
	tokenEntry     = "session-token" // may be left out
)

// maxCredential bounds an entry.
const maxCredential = 4 << 10

// readLogSecret returns the credentials of a Secret, or why there are none.
func readLogSecret(s *corev1.Secret) (c *logship.Credentials, problem string) {
	if s.Type != LogSecretType {
		return nil, fmt.Sprintf("it is of type %s, not %s", s.Type, LogSecretType)
	}
	bad := func(entry string) bool {
		v := s.Data[entry]
		return len(v) > maxCredential || strings.ContainsFunc(string(v), func(r rune) bool { return r <= ' ' || r >= 0x7f })
	}
	for _, entry := range []string{accessKeyEntry, secretKeyEntry, tokenEntry} {
		if bad(entry) || len(s.Data[entry]) == 0 && entry != tokenEntry {
			return nil, fmt.Sprintf("its entry %s is missing, too long, or has blanks", entry)
		}
	}
	return &logship.Credentials{
		AccessKey: string(s.Data[accessKeyEntry]), SecretKey: string(s.Data[secretKeyEntry]), Token: string(s.Data[tokenEntry]),
	}, ""
}

// newUploader returns what uploads access logs, nil if nothing does.
func (p *proxying) newUploader(o SpeakerOptions) *logship.Uploader {
	if o.UploadLogs == nil || o.AccessLogs == "" {
		return nil
	}
	return logship.New(logship.Options{
		Log: o.Log, Dir: o.AccessLogs, Node: o.NodeName, Endpoint: o.UploadLogs.Endpoint, Keep: o.UploadLogs.Keep,
		Finish: p.server.FinishLogs,
		Report: func(n svc.Name, problem string) {
			p.changed(func() {
				if v := p.services[n]; v != nil {
					v.unstored = problem
				}
			})
		},
	})
}

// uploads returns where access logs go, and records why they go nowhere.
func (p *proxying) uploads() map[logship.Owner]logship.Destination {
	to := map[logship.Owner]logship.Destination{}
	p.mu.Lock()
	defer p.mu.Unlock()
	for n, v := range p.services {
		if v.spec == nil || !v.spec.AccessLog.Uploads() {
			v.logFailure, v.unstored = "", ""
			continue
		}
		l, owner := v.spec.AccessLog, logship.OwnerOf(n, string(v.object.UID))
		to[owner] = logship.Destination{} // while there are no credentials
		t := p.secrets[secretKey{svc.Name{Namespace: n.Namespace, Name: l.Secret}, forLogs}]
		problem := v.unstored
		switch {
		case p.upload == nil:
			problem = fmt.Sprintf("access logs are not stored in bucket %s: there is no --lb-access-log-endpoint", l.Bucket)
		case t == nil:
			continue
		case t.credentials != nil:
			to[owner] = logship.Destination{Bucket: l.Bucket, Prefix: l.Prefix, Credentials: *t.credentials}
		case t.problem != "":
			problem = fmt.Sprintf("access logs are not stored in bucket %s: cannot use the Secret %s: %s", l.Bucket, l.Secret, t.problem)
		}
		if problem != v.logFailure && problem != "" {
			p.events.Event(v.object, corev1.EventTypeWarning, "AccessLogsNotStored", "node "+p.node+": "+problem)
		}
		v.logFailure = problem
	}
	return to
}

// registerLogMetrics adds the numbers of access logs.
func (p *proxying) registerLogMetrics(registry *prometheus.Registry) {
	counter := func(name, help string, n func() uint64) {
		registry.MustRegister(prometheus.NewCounterFunc(
			prometheus.CounterOpts{Name: "fairlead_lb_speaker_access_log_" + name, Help: help}, func() float64 { return float64(n()) }))
	}
	counter("dropped_files_total", "Files of access logs that were removed, since there were too many, before they were uploaded.",
		p.server.DroppedLogs)
	if u := p.upload; u != nil {
		counter("stored_files_total", "Files of access logs that were uploaded.", u.Uploaded)
		counter("failed_uploads_total", "Uploads of access logs that have failed, and are retried.", u.Failed)
	}
}
