package dialect

import (
	"fmt"
	"strconv"
	"strings"
)

// AccessLog is where a line for each connection or request goes.
type AccessLog struct {
	Enabled bool     `json:"enabled,omitempty"`
	Every   Duration `json:"every,omitempty"`
	// Format is LogELB, LogALB or LogJSON.
	Format LogFormat `json:"format,omitempty"`
	// Bucket is the one that files are uploaded to, under names that begin with Prefix; empty for none.
	Bucket string `json:"bucket,omitempty"`
	Prefix string `json:"prefix,omitempty"`
	// Secret is the name of the Secret, in the Service's namespace, that has the credentials for the bucket.
	Secret string `json:"secret,omitempty"`
}

// LogFormat is what a line of an access log looks like.
type LogFormat string

// The formats: of AWS's Classic Load Balancer, of its Application Load Balancer for requests of HTTP, and an object of JSON on
// each line.
const (
	LogELB  LogFormat = "elb"
	LogALB  LogFormat = "alb"
	LogJSON LogFormat = "json"
)

// DefaultLogSecret is the name of the Secret with credentials for a bucket, unless an annotation names another one.
const DefaultLogSecret = "lb-access-logs"

// Uploads reports whether access logs go to a bucket.
func (l AccessLog) Uploads() bool { return l.Enabled && l.Bucket != "" }

// ourAccessLogs are our own annotations of access logs.
func ourAccessLogs() []Annotation {
	return []Annotation{
		flag(lbPrefix+"access-log", FieldLogEnabled, false, setLogs),
		logInterval(lbPrefix + "access-log-interval"),
		word(lbPrefix+"access-log-format", map[string]LogFormat{"elb": LogELB, "alb": LogALB, "json": LogJSON}, FieldLogFormat, LogELB,
			func(s *Spec, v LogFormat) { s.AccessLog.Format = v }),
		logBucket(lbPrefix + "access-log-bucket"),
		logPrefix(lbPrefix + "access-log-prefix"),
		{Key: lbPrefix + "access-log-credentials", Sets: []Field{FieldLogCredentials},
			Values: "the name of a Secret of the namespace; " + DefaultLogSecret + " without it", read: func(r *reader, v string) error {
				name, err := secretName(v)
				if err == nil && name != v {
					err = fmt.Errorf("%q is not the name of a Secret: use only lower case letters, digits, dots and hyphens", shorten(v))
				}
				if err == nil {
					r.set(FieldLogCredentials, v, func(s *Spec) { s.AccessLog.Secret = v })
				}
				return err
			}},
	}
}

func setLogs(s *Spec, on bool) { s.AccessLog.Enabled = on }

// logInterval returns an annotation with how often files are finished.
func logInterval(key string) Annotation {
	return Annotation{Key: key, Values: "5 or 60 minutes", Sets: []Field{FieldLogEvery}, read: func(r *reader, v string) error {
		if v != "5" && v != "60" {
			return fmt.Errorf("%q is neither 5 nor 60 minutes", shorten(v))
		}
		n, _ := strconv.Atoi(v)
		r.set(FieldLogEvery, v+" minutes", func(s *Spec) { s.AccessLog.Every = Duration(n) * 60e9 })
		return nil
	}}
}

// logBucket returns an annotation with the name of a bucket of S3.
func logBucket(key string) Annotation {
	return Annotation{Key: key, Values: "a bucket of S3", Sets: []Field{FieldLogBucket}, read: func(r *reader, v string) error {
		return r.setBucket(v)
	}}
}

// setBucket takes a bucket over. Its name becomes a part of a host name, or of a path: see
// https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html
func (r *reader) setBucket(v string) error {
	other := func(c rune) bool { return (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' && c != '.' }
	if len(v) < 3 || len(v) > 63 || strings.ContainsFunc(v, other) || strings.Trim(v, "-.") != v || strings.Contains(v, "..") {
		return fmt.Errorf("%q is not the name of a bucket: 3 to 63 of lower case letters, digits, . and -", shorten(v))
	}
	r.set(FieldLogBucket, v, func(s *Spec) { s.AccessLog.Bucket = v })
	return nil
}

// logPrefix returns an annotation with the beginning of names in a bucket.
func logPrefix(key string) Annotation {
	return Annotation{Key: key, Values: "the beginning of names in it", Sets: []Field{FieldLogPrefix}, read: func(r *reader, v string) error {
		return r.setPrefix(v)
	}}
}

func (r *reader) setPrefix(v string) error {
	v = strings.Trim(v, "/")
	other := func(c rune) bool {
		return (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && !strings.ContainsRune("!-_.*'()/", c)
	}
	for part := range strings.SplitSeq(v, "/") {
		if part == "" || part == "." || part == ".." || len(v) > 512 || strings.ContainsFunc(v, other) || strings.Contains(v, "AWSLogs") {
			return fmt.Errorf("%q is not the beginning of names of objects: 512 letters, digits and !-_.*'()/ at most, without AWSLogs", shorten(v))
		}
	}
	r.set(FieldLogPrefix, v, func(s *Spec) { s.AccessLog.Prefix = v })
	return nil
}
