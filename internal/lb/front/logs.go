package front

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/fairlead/fairlead/internal/lb/logship"
	"github.com/fairlead/fairlead/internal/svc"
)

// LogUpload is where access logs are uploaded to. Services name the buckets; Secrets of their namespaces have the
// credentials.
type LogUpload struct {
	Endpoint logship.Endpoint
	// Keep leaves files in the directory after they were stored.
	Keep bool
}

// LogSecretType is the type of Secrets with credentials for buckets, so that no other Secret is read as one.
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

// newUploader returns the uploader of access logs, nil if nothing is uploaded.
func (f *Front) newUploader(o Options) *logship.Uploader {
	if o.UploadLogs == nil || o.AccessLogs == "" {
		return nil
	}
	return logship.New(logship.Options{
		Log: f.log, Dir: o.AccessLogs, Node: o.NodeName, Endpoint: o.UploadLogs.Endpoint, Keep: o.UploadLogs.Keep,
		Finish: o.Server.FinishLogs,
		Report: func(n svc.Name, problem string) {
			f.changed(func() {
				if s := f.services[n]; s != nil {
					s.unstored = problem
				}
			})
		},
	})
}

// uploads returns where access logs go, and records why some are not stored.
func (f *Front) uploads() map[logship.Owner]logship.Destination {
	to := map[logship.Owner]logship.Destination{}
	f.mu.Lock()
	defer f.mu.Unlock()
	for n, s := range f.services {
		if s.spec == nil || !s.spec.AccessLog.Uploads() {
			s.logFailure, s.unstored = "", ""
			continue
		}
		owner := logship.OwnerOf(n, string(s.object.UID))
		destination, problem, known := f.destinationLocked(n, s)
		to[owner] = destination
		if !known {
			continue
		}
		if problem != s.logFailure && problem != "" {
			f.events.Event(s.object, corev1.EventTypeWarning, "AccessLogsNotStored", "node "+f.node+": "+problem)
		}
		s.logFailure = problem
	}
	return to
}

// destinationLocked returns where the access logs of a Service go, empty while there are no credentials, and what prevents
// storing them. known is false while the Secret has not been read.
func (f *Front) destinationLocked(n svc.Name, s *service) (to logship.Destination, problem string, known bool) {
	l := s.spec.AccessLog
	if f.upload == nil {
		return to, fmt.Sprintf("access logs are not stored in bucket %s: there is no --lb-access-log-endpoint", l.Bucket), true
	}
	t := f.secrets[secretKey{svc.Name{Namespace: n.Namespace, Name: l.Secret}, forLogs}]
	switch {
	case t == nil:
		return to, "", false
	case t.credentials != nil:
		return logship.Destination{Bucket: l.Bucket, Prefix: l.Prefix, Credentials: *t.credentials}, s.unstored, true
	case t.problem != "":
		return to, fmt.Sprintf("access logs are not stored in bucket %s: cannot use the Secret %s: %s", l.Bucket, l.Secret, t.problem), true
	}
	return to, s.unstored, true
}
