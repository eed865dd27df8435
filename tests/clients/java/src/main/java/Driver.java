import com.google.gson.Gson;
import com.google.gson.JsonObject;
import com.sproutsocial.nsq.BackoffHandler;
import com.sproutsocial.nsq.Client;
import com.sproutsocial.nsq.Config;
import com.sproutsocial.nsq.DirectSubscriber;
import com.sproutsocial.nsq.Message;
import com.sproutsocial.nsq.MessageHandler;
import com.sproutsocial.nsq.Publisher;
import com.sproutsocial.nsq.Subscriber;
import java.io.BufferedReader;
import java.io.FileInputStream;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.security.KeyStore;
import java.security.cert.CertificateFactory;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.TimeUnit;
import javax.net.ssl.SSLContext;
import javax.net.ssl.TrustManagerFactory;

/** Drives nsq-j as tests/clients says; see doc.go there. */
public final class Driver {
    /** What the test asks for; the names are those of its JSON. */
    private static final class Ask {
        String mode;
        String tcp;
        String lookup;
        String topic;
        String channel;
        String method;
        long delay_ms;
        int in_flight;
        String handle;
        long hold_ms;
        String tls_ca;
        String compression;
        String auth_secret;
    }

    private static final Gson GSON = new Gson();
    private static final PrintStream OUT = new PrintStream(System.out, true, StandardCharsets.UTF_8);

    private static synchronized void say(JsonObject event) {
        OUT.println(GSON.toJson(event));
    }

    private static JsonObject event(String name) {
        JsonObject o = new JsonObject();
        o.addProperty("event", name);
        return o;
    }

    private static boolean given(String s) {
        return s != null && !s.isEmpty();
    }

    private static Config config(Ask ask) throws Exception {
        Config c = new Config();
        c.setHeartbeatInterval(5000);
        if (given(ask.tls_ca)) {
            c.setTlsV1(true);
            KeyStore store = KeyStore.getInstance(KeyStore.getDefaultType());
            store.load(null, null);
            try (InputStream in = new FileInputStream(ask.tls_ca)) {
                store.setCertificateEntry("ca", CertificateFactory.getInstance("X.509").generateCertificate(in));
            }
            TrustManagerFactory trust = TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm());
            trust.init(store);
            SSLContext context = SSLContext.getInstance("TLS");
            context.init(null, trust.getTrustManagers(), null);
            Client.getDefaultClient().setSSLSocketFactory(context.getSocketFactory());
        }
        if (given(ask.compression)) {
            c.setSnappy(ask.compression.equals("snappy"));
            c.setDeflate(ask.compression.equals("deflate"));
        }
        if (given(ask.auth_secret)) {
            Client.getDefaultClient().setAuthSecret(ask.auth_secret);
        }
        return c;
    }

    private interface Call {
        void run() throws Exception;
    }

    /** Repeats what fails, as a publisher's user does. */
    private static void retry(Call call) throws InterruptedException {
        while (true) {
            try {
                call.run();
                return;
            } catch (Exception e) {
                JsonObject o = event("retry");
                o.addProperty("error", e.toString());
                say(o);
                Thread.sleep(100);
            }
        }
    }

    private static void produce(Ask ask, BufferedReader in) throws Exception {
        Publisher publisher = new Publisher(ask.tcp);
        publisher.setConfig(config(ask));
        publisher.setFailoverDurationSecs(1);
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            List<byte[]> bodies = new ArrayList<>();
            for (String body : GSON.fromJson(line, String[].class)) {
                bodies.add(body.getBytes(StandardCharsets.UTF_8));
            }
            if (ask.method.equals("mpub")) {
                retry(() -> publisher.publish(ask.topic, bodies));
            } else {
                for (byte[] body : bodies) {
                    if (ask.method.equals("dpub")) {
                        retry(() -> publisher.publishDeferred(ask.topic, body, ask.delay_ms, TimeUnit.MILLISECONDS));
                    } else {
                        retry(() -> publisher.publish(ask.topic, body));
                    }
                }
            }
            JsonObject o = event("published");
            o.addProperty("count", bodies.size());
            say(o);
        }
    }

    private static void handle(Ask ask, Message m) {
        JsonObject o = event("message");
        o.addProperty("body", new String(m.getData(), StandardCharsets.UTF_8));
        o.addProperty("attempts", m.getAttempts());
        say(o);
        if (ask.handle.equals("touch")) {
            for (int i = 0; i < 8; i++) {
                try {
                    Thread.sleep(ask.hold_ms / 8);
                } catch (InterruptedException e) {
                    return;
                }
                m.touch();
            }
        } else if (ask.handle.equals("requeue") && m.getAttempts() == 1) {
            m.requeue(0);
            return;
        }
        m.finish();
    }

    private static void consume(Ask ask, BufferedReader in) throws Exception {
        Subscriber subscriber = given(ask.lookup) ? new Subscriber(1, ask.lookup) : new DirectSubscriber(1, ask.tcp);
        subscriber.setConfig(config(ask));
        subscriber.setMaxFlushDelayMillis(100);
        MessageHandler handler = m -> handle(ask, m);
        if (ask.handle.equals("fail")) {
            // Finishes, or requeues what throws, and pauses after it.
            handler = new BackoffHandler(m -> {
                JsonObject o = event("message");
                o.addProperty("body", new String(m.getData(), StandardCharsets.UTF_8));
                o.addProperty("attempts", m.getAttempts());
                say(o);
                if (m.getAttempts() == 1) {
                    throw new IllegalStateException("fails on purpose");
                }
            }, 200, 1000);
        }
        subscriber.subscribe(ask.topic, ask.channel, ask.in_flight, handler);
        while (in.readLine() != null) {
            continue; // the end of the input is the sign
        }
    }

    public static void main(String[] args) throws Exception {
        Ask ask = GSON.fromJson(args[0], Ask.class);
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        if (ask.mode.equals("produce")) {
            produce(ask, in);
        } else {
            consume(ask, in);
        }
        Client.getDefaultClient().stop(1000);
        say(event("done"));
        System.exit(0);
    }
}
